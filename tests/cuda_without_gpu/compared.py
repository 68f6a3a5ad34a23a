"""Jobs traced natively and by the rules, in a process that `guard.cpp` was loaded into; prints JSON.

Only the choice among attention kernels is missing, which is asked of the GPU: all attention is plain.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from flatout.hardware.simulated import simulated_device
from flatout.memory.cuda import rules
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.predict.estimate import estimate
from flatout.memory.predict.replay import fit_replay
from flatout.memory.process.isolated_process import run_in_child
from flatout.memory.trace.make_trace import import_before_forking, trace_here
from flatout.memory.trace.record import Trace
from flatout.memory.trace.tracer import trace_job


class Chosen(nn.Module):
    """Rows by a mask of integers, whose values have to be known on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(10, 64), nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        counted = tokens.int() if tokens.is_cuda else tokens.float()  # as libraries do it, by device
        counts = torch.histc(counted, bins=10, min=0, max=9).tolist()
        parts = self.table(tokens)[tokens > 4].split([int(count) for count in counts[5:]])
        return sum((self.last(part).sum() for part in parts), torch.zeros((), device=tokens.device))


class Attention(nn.Module):
    """Under a mask that no fused kernel reads, so that there is nothing to choose."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.bias = nn.Linear(16, 48), nn.Parameter(torch.zeros(24, 24, 2))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inward(x).view(len(x), 24, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = self.bias.permute(2, 0, 1).to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], *, packed: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.layers = kind(16, 32, num_layers=2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            return self.layers(x)[0]  # type: ignore[no-any-return]
        lengths = torch.arange(len(x), 0, -1)
        rows = pack_padded_sequence(x, lengths, batch_first=True)
        return pad_packed_sequence(self.layers(rows)[0], batch_first=True)[0]


def rows(batch_size: int) -> Tensor:
    return torch.ones(batch_size, 24, 16)


def tokens(batch_size: int) -> Tensor:
    return torch.arange(batch_size * 10).reshape(batch_size, 10) % 10


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 16))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(24, 32, 3), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 8, 3))


def turned(batch_size: int) -> Tensor:
    return rows(batch_size).transpose(1, 2)


def halves(batch_size: int) -> Tensor:
    """In bfloat16 a Hopper's fused layer makes the matrix of scores and leaves no choice."""
    return rows(batch_size).bfloat16()


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)


def job_of(make_model: Callable[[], nn.Module], make_batch: Callable[..., Any]) -> Job:
    return Job(name="job", make_model=make_model, make_batch=make_batch, loss=loss)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()  # type: ignore[no-any-return]


ACCUMULATED = Recipe(precision="bf16", accumulation=2, clip_norm=1.0)
LAYERS, IMAGES = job_of(layers, rows), job_of(convolutions, rows)
CASES: dict[str, tuple[Job, Recipe]] = {
    "layers": (LAYERS, Recipe()),
    "layers, bf16, accumulated and clipped": (LAYERS, ACCUMULATED),
    "layers, fp16": (LAYERS, Recipe(precision="fp16")),
    "layers, evaluated": (LAYERS, Recipe(mode="evaluate")),
    "convolutions": (IMAGES, Recipe()),
    "convolutions, bf16": (IMAGES, Recipe(precision="bf16")),
    "lstm": (job_of(functools.partial(Recurrent, nn.LSTM), rows), Recipe()),
    "lstm, bf16": (job_of(functools.partial(Recurrent, nn.LSTM), rows), Recipe(precision="bf16")),
    "gru, packed": (job_of(functools.partial(Recurrent, nn.GRU, packed=True), rows), Recipe()),
    "attention": (job_of(Attention, rows), Recipe()),
    "attention, bf16": (job_of(Attention, rows), Recipe(precision="bf16")),
    "rows by a mask": (job_of(Chosen, tokens), Recipe()),
    "rows that lie otherwise": (job_of(lambda: nn.Linear(24, 8), turned), Recipe()),
    "encoder layer, evaluated": (job_of(encoder, halves), Recipe(mode="evaluate", precision="pure-bf16")),
}


def stand_in_for_cuda() -> None:
    """What is asked of CUDA in Python, answered as a GPU would that computes nothing."""
    cuda: Any = torch.cuda
    cuda.is_bf16_supported = lambda *args, **kwargs: True
    cuda.amp.common.amp_definitely_not_available = lambda: False
    cuda.is_initialized = lambda: False
    fake_tensors: Any = fake_tensor
    fake_tensors.init_gpu_context = lambda device: None


def natively(job: Job, recipe: Recipe, sizes: dict[str, int]) -> Trace:
    rules.install_natively(compute_capability=(9, 0))
    return trace_job(job, recipe, sizes=sizes, device="cuda")


def peaks(found: Any) -> list[int]:
    return [found.peak_allocated_bytes, found.peak_reserved_bytes]


def compared(job: Job, recipe: Recipe) -> dict[str, Any]:
    native = run_in_child(natively, job, recipe, dict(job.sizes))
    ruled = run_in_child(trace_here, job, recipe, job.sizes, device=simulated_device("H200"))
    guesses = [[guess.answer for guess in trace.guesses] for trace in (native, ruled)]
    return {
        "native": peaks(estimate(native)),
        "rules": peaks(estimate(ruled)),
        "guesses": guesses,
        "is_native": [native.native, ruled.native],
    }


def replayed(job: Job, recipe: Recipe) -> list[list[int]]:
    small = [run_in_child(natively, job, recipe, {"batch_size": size}) for size in (8, 16, 24)]
    fresh = run_in_child(natively, job, recipe, {"batch_size": 80})
    return [peaks(estimate(fit_replay(small).at(batch_size=80))), peaks(estimate(fresh))]


def main() -> None:
    stand_in_for_cuda()
    import_before_forking()
    answers = {name: compared(*case) for name, case in CASES.items()}
    print(json.dumps({"cases": answers, "replayed": replayed(*CASES["layers, fp16"])}))


if __name__ == "__main__":
    sys.exit(main())
