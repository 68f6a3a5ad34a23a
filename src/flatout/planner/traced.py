"""The forecast of a plan from traces: the memory room behind the planner's questions.

With `profile` the job is also run for real, at two small batches, for each recipe that is asked for: what the
traces missed there corrects the answers, and the seconds of a micro-batch are measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flatout.errors import BadInput
from flatout.hardware.device import Device
from flatout.memory.job import Job, Recipe, adamw, optimizer_named
from flatout.planner.forecast import LargestBatch, Peak, traced

if TYPE_CHECKING:
    from flatout.memory.receipts import Receipt

BATCH = "batch_size"
MOST_RETRIES = 8
Key = tuple[Recipe, tuple[tuple[str, int], ...]]


class TracedForecast:
    """Answers for one job on one device; what was traced once is replayed afterwards."""

    def __init__(
        self,
        job: Job,
        *,
        device: Device,
        ranks: int = 1,
        profile: bool = False,
        on_progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        from flatout.memory.forecast import Forecaster

        self._forecaster = Forecaster(job, device=device, ranks=ranks, on_progress=on_progress)
        self._profile = profile
        self._on_progress = on_progress
        self._receipts: dict[Key, Receipt] = {}
        self._largest: dict[tuple[Key, int], LargestBatch] = {}

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._forecaster.job.sizes

    def peak_bytes(self, sizes: Mapping[str, int], *, recipe: Recipe) -> Peak:
        from flatout.memory.allocator import simulate

        recipe = traced(recipe)
        if self._profile:
            return self._corrected(sizes, recipe=recipe)
        found = self._forecaster.what_if(recipe, sizes=sizes)
        done = simulate(found.trace.events, found.num_bytes)
        return self._peak(done.peak_allocated_bytes, done.peak_reserved_bytes, recipe, sizes)

    def largest_batch(self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int) -> LargestBatch:
        key = (_key(traced(recipe), sizes), capacity_bytes)
        if key not in self._largest:
            self._largest[key] = self._searched(traced(recipe), sizes, capacity_bytes)
        return self._largest[key]

    def step_s(self, sizes: Mapping[str, int], *, recipe: Recipe) -> float | None:
        """Seconds of a micro-batch, carried on from the larger probe in proportion to the batch."""
        if not self._profile:
            return None
        largest = max(self._receipt(traced(recipe), sizes).probes, key=lambda probe: probe.batch_size)
        if largest.micro_batch_s is None:
            return None
        return largest.micro_batch_s * sizes[BATCH] / largest.batch_size

    def _searched(self, recipe: Recipe, sizes: Mapping[str, int], capacity_bytes: int) -> LargestBatch:
        cap_bytes = capacity_bytes - self._context_bytes(recipe, sizes)
        others = {name: size for name, size in sizes.items() if name != BATCH}
        if cap_bytes <= 0:
            return LargestBatch(safe=None, limit=None)
        found = self._forecaster.largest_batch(recipe, cap_bytes=cap_bytes, sizes=others)
        safe = found.safe
        for _ in range(MOST_RETRIES if self._profile else 0):
            if safe < 1:
                break
            reserved = self._corrected({**others, BATCH: safe}, recipe=recipe).reserved_bytes
            if reserved <= cap_bytes:
                break
            safe = min(safe - 1, int(safe * cap_bytes / reserved))
        return LargestBatch(safe=safe or None, limit=max(safe, found.limit) or None)

    def _corrected(self, sizes: Mapping[str, int], *, recipe: Recipe) -> Peak:
        from flatout.memory.receipts import correct

        receipt = self._receipt(recipe, sizes)
        estimate = self._forecaster.estimate(recipe, sizes=sizes)
        at_probes = [
            self._forecaster.estimate(recipe, sizes={**sizes, BATCH: probe.batch_size})
            for probe in receipt.probes
        ]
        found = correct(estimate, receipt, at_probes=at_probes)
        return self._peak(found.peak_allocated_bytes, found.peak_reserved_bytes, recipe, sizes)

    def _peak(self, allocated: int, reserved: int, recipe: Recipe, sizes: Mapping[str, int]) -> Peak:
        process = reserved + self._context_bytes(recipe, sizes)
        return Peak(allocated_bytes=allocated, reserved_bytes=reserved, process_bytes=process)

    def _context_bytes(self, recipe: Recipe, sizes: Mapping[str, int]) -> int:
        measured = self._receipt(recipe, sizes).context_bytes if self._profile else None
        return self._forecaster.context.value if measured is None else measured

    def _receipt(self, recipe: Recipe, sizes: Mapping[str, int]) -> Receipt:
        from flatout.memory.probe import probe

        key = _key(recipe, sizes)
        if key not in self._receipts:
            self._on_progress(f"running {self._forecaster.job.name} for a few steps")
            complete = {**self._forecaster.job.sizes, **sizes}
            self._receipts[key] = probe(self._forecaster.job, recipe, sizes=complete)
        return self._receipts[key]


def _key(recipe: Recipe, sizes: Mapping[str, int]) -> Key:
    return recipe, tuple(sorted((name, size) for name, size in sizes.items() if name != BATCH))


def with_optimizer(job: Job, name: str | None, *, on_progress: Callable[[str], None]) -> Job:
    """The job with the optimizer that its config names, where the job leaves it open."""
    if name is None or job.make_optimizer is not adamw:
        return job
    make = optimizer_named(name)
    if make is None:
        on_progress(f"the optimizer {name!r} is not known; planned as AdamW, which keeps two values each")
        return job
    return dataclasses.replace(job, make_optimizer=make)


def nested(values: Mapping[str, object]) -> dict[str, object]:
    """Values by dotted key as the mapping they stand for: {"a.b": 1} is {"a": {"b": 1}}."""
    result: dict[str, object] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        place = result
        for name in path:
            inner = place.setdefault(name, {})
            if not isinstance(inner, dict):
                raise BadInput(f"{key} lies below {name}, which has a value of its own")
            place = inner
        place[last] = value
    return result
