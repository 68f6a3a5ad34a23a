"""The forecast of a plan from traces: the memory room behind the planner's questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flatout.errors import BadInput
from flatout.hardware.device import Device
from flatout.memory.job import Job, Recipe
from flatout.planner.forecast import LargestBatch, Peak, traced


class TracedForecast:
    """Answers for one job on one device; what was traced once is replayed afterwards."""

    def __init__(
        self, job: Job, *, device: Device, on_progress: Callable[[str], None] = lambda message: None
    ) -> None:
        from flatout.memory.forecast import Forecaster

        self._forecaster = Forecaster(job, device=device, on_progress=on_progress)
        self._largest: dict[tuple[Recipe, tuple[tuple[str, int], ...], int], LargestBatch] = {}

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._forecaster.job.sizes

    def peak_bytes(self, sizes: Mapping[str, int], *, recipe: Recipe) -> Peak:
        from flatout.memory.allocator import simulate

        found = self._forecaster.what_if(traced(recipe), sizes=sizes)
        done = simulate(found.trace.events, found.num_bytes)
        return Peak(
            allocated_bytes=done.peak_allocated_bytes,
            reserved_bytes=done.peak_reserved_bytes,
            process_bytes=done.peak_reserved_bytes + self._forecaster.context.value,
        )

    def largest_batch(self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int) -> LargestBatch:
        others = {name: size for name, size in sizes.items() if name != "batch_size"}
        key = (traced(recipe), tuple(sorted(others.items())), capacity_bytes)
        if key not in self._largest:
            self._largest[key] = self._searched(key[0], others, capacity_bytes)
        return self._largest[key]

    def _searched(self, recipe: Recipe, sizes: Mapping[str, int], capacity_bytes: int) -> LargestBatch:
        cap_bytes = capacity_bytes - self._forecaster.context.value
        if cap_bytes <= 0:
            return LargestBatch(safe=None, limit=None)
        found = self._forecaster.largest_batch(recipe, cap_bytes=cap_bytes, sizes=sizes)
        return LargestBatch(safe=found.safe or None, limit=found.limit or None)

    def step_s(self, sizes: Mapping[str, int], *, recipe: Recipe) -> float | None:
        return None


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
