from __future__ import annotations

import pytest

from flatout.memory.jobs.job import Recipe
from flatout.planner.forecast.questions import Forecast, traced
from tests.support.planner import GIB, ToyForecast


@pytest.mark.parametrize(("accumulation", "expected"), [(1, 1), (2, 2), (16, 2)])
def test_no_more_micro_batches_are_traced_than_memory_can_tell_apart(
    accumulation: int, expected: int
) -> None:
    recipe = Recipe(precision="bf16", accumulation=accumulation, clip_norm=1.0, checkpointing=True)
    assert traced(recipe) == Recipe(
        precision="bf16", accumulation=expected, clip_norm=1.0, checkpointing=True
    )


def test_a_straight_line_is_a_forecast() -> None:
    forecast: Forecast = ToyForecast()
    sizes = {"batch_size": 3, "n_negatives": 1}
    largest = forecast.largest_batch(sizes, recipe=Recipe(), capacity_bytes=10 * GIB)
    assert largest.safe is not None and largest.tight is not None
    assert largest.safe < largest.tight
    at, above = (
        forecast.peak_bytes({**sizes, "batch_size": batch}, recipe=Recipe()).process_bytes
        for batch in (largest.safe, largest.safe + 1)
    )
    assert at <= 10 * GIB < above
    trains = [
        forecast.trains({**sizes, "batch_size": batch}, recipe=Recipe(), capacity_bytes=10 * GIB)
        for batch in (largest.tight, largest.tight + 1)
    ]
    assert trains == [True, False]
    assert forecast.step_s(sizes, recipe=Recipe()) is None
