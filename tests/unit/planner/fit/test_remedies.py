from __future__ import annotations

import pytest

from flatout.ground.errors import BatchDoesNotFit
from flatout.hardware.matching import all_datasheets
from flatout.planner.fit.fits import Judge
from flatout.planner.fit.remedies import does_not_fit, lower_sizes, needed_bytes, smallest_gpu
from tests.support import planner as plans
from tests.support.planner import GIB, ToyForecast

HEAVY = ToyForecast(sample_bytes=16 * GIB)


def said(usable_gib: float, *, forecast: ToyForecast = HEAVY, name: str = "24GB", **stage: object) -> str:
    stages = (plans.stage(**stage),)  # type: ignore[arg-type]
    error = does_not_fit(
        stages, judge=Judge(budget=plans.budget(round(usable_gib * GIB), name=name), forecast=forecast)
    )
    assert isinstance(error, BatchDoesNotFit)
    return str(error)


def test_it_says_what_is_needed_and_what_there_is() -> None:
    text = said(10)
    needed = needed_bytes(plans.stage(), plans.stage().recipe, forecast=HEAVY, over={})
    assert text.startswith(f"batch_size=1 needs {needed / GIB:.1f} GiB; 24GB has 10.0 GiB free")
    assert "LoRA" in text and "\n" not in text


@pytest.mark.parametrize(
    ("usable_gib", "helps", "does_not"),
    [
        (14, ("checkpointing (", "bf16 ("), ("checkpointing and bf16",)),
        (9.5, ("checkpointing (",), ("bf16 (", "checkpointing and bf16")),
        (7.5, ("checkpointing and bf16 (",), ("help: checkpointing (", "; bf16 (")),
        (5, (), ("checkpointing", "bf16")),
    ],
)
def test_what_would_help_is_estimated(
    usable_gib: float, helps: tuple[str, ...], does_not: tuple[str, ...]
) -> None:
    text = said(usable_gib)
    assert all(words in text for words in helps), text
    assert not any(words in text for words in does_not), text


def test_what_is_there_already_is_not_offered() -> None:
    assert "checkpointing" not in said(5, checkpointing=True)
    assert "bf16" not in said(12, precision="fp16")
    assert "bf16" not in said(14, name="T4")  # Turing has none
    assert "checkpointing" not in said(9.5, forecast=ToyForecast(sample_bytes=16 * GIB, can_checkpoint=False))


def test_the_smallest_gpu_that_would() -> None:
    name = smallest_gpu(17 * GIB, margin=0.85, bf16=False)
    row = next(row for row in all_datasheets() if row.name == name)
    assert row.memory_bytes * 0.85 >= 17 * GIB
    smaller = [
        one for one in all_datasheets() if one.vendor == "NVIDIA" and one.memory_bytes < row.memory_bytes
    ]
    assert smaller and all(one.memory_bytes * 0.85 < 17 * GIB for one in smaller)
    assert f"a GPU from {smallest_gpu(round(20.6 * GIB), margin=1.0, bf16=False)} on" in said(10)
    assert smallest_gpu(10**15, margin=1.0, bf16=False) is None
    with_bf16 = smallest_gpu(1, margin=1.0, bf16=True)
    assert next(row for row in all_datasheets() if row.name == with_bf16).bf16


def test_the_worst_stage_is_named() -> None:
    stages = (
        plans.stage(name="01", sizes={"n_negatives": 1}),
        plans.stage(name="02", sizes={"n_negatives": 9}),
    )
    error = does_not_fit(stages, judge=Judge(budget=plans.budget(GIB), forecast=ToyForecast()))
    assert "in 02;" in error.message


def test_sizes_are_lowered_in_the_order_they_were_allowed() -> None:
    sizes = {"batch_size": 1, "n_negatives": 1, "length": 4}
    forecast = ToyForecast(sizes=sizes, fragmentation=1.0)
    stage = plans.stage(sizes={"n_negatives": 100, "length": 4})
    needed = needed_bytes(stage, stage.recipe, forecast=forecast, over={"n_negatives": 50})
    budget = plans.budget(needed)
    judge = Judge(budget=budget, forecast=forecast)
    tiny = Judge(budget=plans.budget(1), forecast=forecast)
    assert lower_sizes([stage], judge=judge, allow=("n_negatives", "length")) == {
        "training": {"n_negatives": 50}
    }
    assert lower_sizes([stage], judge=judge, allow=("length",)) == {}
    assert lower_sizes([stage], judge=judge, allow=("unheard_of",)) == {}
    assert lower_sizes([stage], judge=tiny, allow=("n_negatives",)) == {}
