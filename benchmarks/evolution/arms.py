"""Ways to let a population generate: each arm runs one epoch of `rows` rows and says how many tokens it made.

All arms share one engine (cache, kernels, graph), so that a ratio speaks of the perturbation alone.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.engines.evolution.eggroll import Eggroll
from flatout.multiplex.decode.generator import Generator
from flatout.multiplex.decode.requests import Request
from flatout.multiplex.decode.steppers import Mode
from flatout.multiplex.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Load:
    """What every arm has to do: `rows` prompts of `prompt` tokens, `new` tokens each."""

    rows: int
    prompt: int
    new: int
    mode: Mode = "auto"

    def prompts(self, count: int, vocabulary: int) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(count)
        drawn = torch.randint(0, vocabulary, (count, self.prompt), generator=generator)
        return [tuple(row) for row in drawn.tolist()]


def wait(decoder: Decoder) -> None:
    if decoder.device.type == "cuda":
        torch.cuda.synchronize()


class Plain:
    """Plain inference: every row runs the base model."""

    def __init__(self, decoder: Decoder, load: Load, *, slots: int | None = None) -> None:
        self.decoder, self.load = decoder, load
        self.slots = slots or load.rows
        self.generator = Generator(
            decoder, slots=self.slots, max_tokens=load.prompt + load.new, mode=load.mode
        )
        prompts = load.prompts(self.slots, decoder.vocabulary)
        self.requests = [Request(prompt=prompt, key=key) for key, prompt in enumerate(prompts)]

    def epoch(self) -> int:
        done = self.generator.generate(self.requests, max_new_tokens=self.load.new)
        return sum(len(one.tokens) for one in done)


class Population:
    """Ours: `rows / per_member` members in one batch; noise, fitness and update included."""

    def __init__(
        self, decoder: Decoder, load: Load, *, per_member: int, rank: int, **options: object
    ) -> None:
        self.load, self.decoder = load, decoder
        self.members = load.rows // per_member
        self.engine = Eggroll(decoder, population=self.members, rank=rank, sigma=1e-3, lr=1e-3, **options)  # type: ignore[arg-type]
        self.prompts = load.prompts(per_member, decoder.vocabulary)
        self.update_s: list[float] = []

    def epoch(self) -> int:
        done = self.engine.generate(
            self.prompts, max_new_tokens=self.load.new, slots=self.load.rows,
            max_tokens=self.load.prompt + self.load.new, mode=self.load.mode,
        )  # fmt: skip
        wait(self.decoder)
        start = time.perf_counter()
        rewards = torch.tensor([[float(one.tokens[-1] % 7) for one in row] for row in done])
        self.engine.tell(rewards, cosine=False)
        wait(self.decoder)
        self.update_s.append(time.perf_counter() - start)
        return sum(len(one.tokens) for row in done for one in row)

    def noise_s(self) -> float:
        """Seconds of drawing one epoch's factors."""
        taken = []
        for epoch in range(1000, 1003):
            wait(self.decoder)
            start = time.perf_counter()
            self.engine._noise.resident(
                variants=range(self.engine.num_variants), epoch=epoch, capacity=self.engine.num_variants
            )
            wait(self.decoder)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)


class Swap:
    """The seed's way: perturb the weights, generate the member's rows, restore; `timed` members are run."""

    def __init__(self, decoder: Decoder, load: Load, *, per_member: int, rank: int, timed: int) -> None:
        self.decoder, self.timed, self.rank = decoder, timed, rank
        self.plain = Plain(decoder, load, slots=per_member)
        self.saved = {name: product.weight.clone() for name, product in decoder.projections().items()}

    def epoch(self) -> int:
        tokens = 0
        for _ in range(self.timed):
            for product in self.decoder.projections().values():
                rows, columns = product.weight.shape
                product.weight.addmm_(
                    _noise(rows, self.rank, product.weight),
                    _noise(self.rank, columns, product.weight),
                    alpha=1e-3,
                )
            tokens += self.plain.epoch()
            for name, product in self.decoder.projections().items():
                product.weight.copy_(self.saved[name])
        return tokens


def _noise(rows: int, columns: int, like: Tensor) -> Tensor:
    return torch.randn(rows, columns, device=like.device, dtype=like.dtype)
