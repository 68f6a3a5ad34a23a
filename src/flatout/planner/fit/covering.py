"""Which stages of a curriculum have to be searched: those that no other stage covers.

A stage with as many negatives and as long texts as another, and more of one of them, needs more memory; then
the largest batch of the first fits for the second.  That holds for nearly every size a job may have, and
not for all (larger patches make fewer tokens), so that whoever leaves a stage out checks it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flatout.planner.config.settings import StageSettings


def uncovered(
    stages: Sequence[StageSettings],
    *,
    sizes_of: Callable[[StageSettings], Mapping[str, int]],
    ways_of: Callable[[StageSettings], object],
) -> tuple[StageSettings, ...]:
    """Stages that no other one covers: trained in the same way (`ways_of`) at sizes nowhere below; of
    equals the first.
    """
    kept: list[StageSettings] = []
    for number, stage in enumerate(stages):
        sizes, way = sizes_of(stage), ways_of(stage)
        alike = [other for other in (*kept, *stages[number + 1 :]) if ways_of(other) == way]
        if not any(
            _covers(sizes_of(other), sizes) and (other in kept or sizes_of(other) != sizes) for other in alike
        ):
            kept.append(stage)
    return tuple(kept)


def _covers(sizes: Mapping[str, int], others: Mapping[str, int]) -> bool:
    return all(size >= others[name] for name, size in sizes.items())
