"""What a fused step takes of a T4 that is not here: five adapters on RoBERTa-base, in float16.

The step is the real one (encoder, adapters, heads, decoder, losses), run on tensors without data; every
allocation is replayed through CUDA's allocator.

    python examples/adapters/plan_t4.py --tokens 4096
    python examples/adapters/plan_t4.py --config examples/adapters/real.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, RobertaConfig

from flatout.engines.adapters.lora.bank import AdapterBank, AdapterSpec
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.token_blocks import TokenBlock
from flatout.engines.adapters.settings import DEFAULT_RANK, AdaptSettings, make_settings, read_settings
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.adapters.tasks.known import task_named
from flatout.engines.adapters.tasks.task import TaskBatch
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.predict.estimate import MemoryEstimate
from flatout.memory.predict.forecast import estimate_job

GPU, CAPABILITY = "T4", (7, 5)
RANKS = {"sentiment": 16, "qa": 24, "summarisation": 32, "code": 32, "translation": 32}


class PlannedEncoder(PackedEncoder):
    """Without the look at its own states: here they have no values."""

    def _check(self) -> list[tuple[str, Tensor]]:
        return []


class Fused(nn.Module):
    """Everything that a step of phase 1 reads and writes."""

    def __init__(self, config: AdaptSettings, shape: Any) -> None:
        super().__init__()
        self.base = AutoModel.from_config(shape, add_pooling_layer=False)
        specs = [
            AdapterSpec(name=name, rank=task.rank or DEFAULT_RANK, dropout=task.dropout)
            for name, task in config.tasks.items()
        ]
        device = next(self.base.parameters()).device
        bank = AdapterBank(self.base, specs, dtype=torch.float16, device=device)
        self.adapters = nn.ParameterList([bank.parameters_of(number)[0] for number in range(len(specs))])
        self.encoder = PlannedEncoder(self.base, bank, dtype=torch.float16)
        self.tasks = {
            name: task_named(task.kind or name, **task.settings) for name, task in config.tasks.items()
        }
        words = self.base.get_input_embeddings().weight
        longest = max(getattr(task, "max_target_length", 1) for task in self.tasks.values())
        self.decoder = TextDecoder(
            words, end_id=2, pad_id=0, num_layers=config.decoder.layers, max_length=longest
        )
        self.heads = nn.ModuleDict(
            {
                name: task.head(self.encoder.width, decoder=self.decoder if task.needs_decoder else None)
                for name, task in self.tasks.items()
            }
        )

    def loss(self, batches: list[dict[str, Tensor]]) -> Tensor:
        made = [_batch(number, tensors) for number, tensors in enumerate(batches)]
        states = self.encoder(tuple(batch.block for batch in made), dropout=True)
        parts = zip(self.tasks.items(), states, made, strict=True)
        return torch.stack(
            [task.loss(self.heads[name], state, batch).float() for (name, task), state, batch in parts]
        ).sum()


def _batch(number: int, tensors: dict[str, Tensor]) -> TaskBatch:
    return TaskBatch(
        block=TokenBlock(adapter=number, ids=tensors["block_ids"], lengths=tensors["lengths"]),
        targets={
            name: tensor for name, tensor in tensors.items() if name not in ("block_ids", "lengths", "count")
        },
        count=tensors["count"],
        examples=(),
    )


def batches(config: AdaptSettings, *, batch_size: int) -> list[dict[str, Tensor]]:
    """A block of `batch_size` tokens per task, every row as long as it may be: the worst step there is."""
    found = []
    for name, given in config.tasks.items():
        task = task_named(given.kind or name, **given.settings)
        length = given.max_length or config.max_length
        written = getattr(task, "max_target_length", 0) if task.needs_decoder else 0
        rows = max(1, (given.tokens or batch_size) // (length + written))
        ids, none = torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        tensors = {"block_ids": ids, "lengths": torch.full((rows,), length), "count": torch.tensor(1.0)}
        if written:
            places = torch.zeros(rows * written, dtype=torch.int64)
            tensors |= {
                "ids": torch.zeros(rows, written, dtype=torch.int64),
                "places": places,
                "labels": places.clone(),
            }
        elif name == "qa":
            tensors |= {
                "start": none,
                "end": none.clone(),
                "allowed": torch.ones(rows, length, dtype=torch.bool),
            }
        else:
            tensors["label"] = none
        found.append(tensors)
    return found


def plan(config: AdaptSettings, shape: Any) -> MemoryEstimate:
    """The memory of one step of phase 1 on a T4."""
    job = Job(
        name="five adapters",
        make_model=lambda: Fused(config, shape),
        make_batch=lambda *, batch_size: batches(config, batch_size=batch_size),
        loss=lambda model, given: model.loss(given),
        sizes={"batch_size": config.phase1.tokens},
    )
    with mock.patch("torch.cuda.get_device_capability", return_value=CAPABILITY):
        return estimate_job(job, Recipe(precision="fp16", clip_norm=config.phase1.clip), device=GPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, help="a config of flatout adapt, and its model")
    parser.add_argument("--tokens", type=int, default=2048, help="of one task's block")
    given = parser.parse_args()
    if given.config is not None:
        config = make_settings(read_settings(given.config))
        shape = AutoConfig.from_pretrained(config.model)
    else:
        tasks = {name: {"rank": rank} for name, rank in RANKS.items()}
        config = make_settings({"model": "-", "tasks": tasks, "phase1": {"tokens": given.tokens}})
        shape = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    print(plan(config, shape))


if __name__ == "__main__":
    main()
