from __future__ import annotations

from collections.abc import Mapping

import pytest

from flatout.ground.errors import BadInput, UnknownDevice
from flatout.hardware.snapshot import GpuSnapshot, Snapshot
from flatout.memory.jobs.job import Recipe
from flatout.memory.predict.forecast import BatchBounds
from flatout.planner.fit.fits import (
    SURE_MARGIN,
    Forecast,
    Judge,
    evaluation_recipe,
    find_budget,
    job_sizes,
    leaning_notes,
    least,
)
from tests.support import planner as plans
from tests.support.planner import GIB, MIB, ToyForecast

STAGE = plans.stage()
SIZES = {"batch_size": 1, "n_negatives": 1}
GUESSED = ToyForecast(caveats=("the kernels of this GPU have not been measured",))


def judge(forecast: ToyForecast | None = None, *, margin: float = 0.85) -> Judge:
    return Judge(budget=plans.budget(10 * GIB, margin=margin), forecast=forecast or ToyForecast())


def test_what_fits_trains_within_the_margin_and_may_hold_more() -> None:
    subject = judge()
    found = subject.largest(STAGE, SIZES, recipe=Recipe())
    assert found.safe is not None and found.tight is not None and found.safe < found.tight
    at = {**SIZES, "batch_size": found.tight}
    assert subject.fits(STAGE, at, recipe=Recipe())
    assert not subject.fits(STAGE, {**SIZES, "batch_size": found.tight + 1}, recipe=Recipe())
    held = subject.peak(STAGE, at, recipe=Recipe()).process_bytes
    assert subject.budget.usable_bytes < held < subject.budget.free_bytes.value


def test_what_trains_within_the_margin_alone_does_not_fit() -> None:
    """As where more room lets the allocator cut its segments otherwise, until nothing can be handed back."""

    class Unlucky(ToyForecast):
        def trains(self, sizes: Mapping[str, int], *, recipe: Recipe, capacity_bytes: int) -> bool:
            return capacity_bytes <= 10 * GIB and super().trains(
                sizes, recipe=recipe, capacity_bytes=capacity_bytes
            )

    subject = judge(Unlucky(fragmentation=1.3))
    lucky = judge(ToyForecast(fragmentation=1.3)).largest(STAGE, SIZES, recipe=Recipe())
    found = subject.largest(STAGE, SIZES, recipe=Recipe())
    assert found.tight == found.safe == lucky.safe and lucky.safe != lucky.tight
    assert subject.fits(STAGE, {**SIZES, "batch_size": found.safe or 0}, recipe=Recipe())
    assert not subject.fits(STAGE, {**SIZES, "batch_size": lucky.tight or 0}, recipe=Recipe())


def test_nothing_is_held_beyond_what_is_free() -> None:
    subject = judge(ToyForecast(fragmentation=2.0), margin=1.0)
    peak = subject.peak(STAGE, {**SIZES, "batch_size": 20}, recipe=Recipe())
    held = subject.held(peak)
    assert held.process_bytes == subject.budget.free_bytes.value < peak.process_bytes
    assert held.process_bytes - held.reserved_bytes == peak.process_bytes - peak.reserved_bytes
    small = subject.peak(STAGE, SIZES, recipe=Recipe())
    assert subject.held(small) == small


@pytest.mark.parametrize("fragmentation", [1.01, 1.3])
@pytest.mark.parametrize("margin", [0.5, SURE_MARGIN, 0.95, 1.0])
def test_a_guess_has_a_tenth_for_head_room_or_is_safe(margin: float, fragmentation: float) -> None:
    sure, subject = (
        judge(ToyForecast(fragmentation=fragmentation, caveats=caveats), margin=margin)
        for caveats in ((), GUESSED.caveats)
    )
    plain, found = (each.largest(STAGE, SIZES, recipe=Recipe()) for each in (sure, subject))
    cautious = margin > SURE_MARGIN
    assert (subject.caution(STAGE) is not None) is cautious
    assert sure.caution(STAGE) is None
    assert plain.tight is not None and found.tight is not None
    assert found.tight < plain.tight if cautious else found == plain
    for batch_size in range(1, plain.tight + 2):
        at = {**SIZES, "batch_size": batch_size}
        assert subject.fits(STAGE, at, recipe=Recipe()) is (batch_size <= found.tight)


def test_a_wider_margin_never_takes_a_smaller_batch() -> None:
    found = []
    for margin in (0.7, 0.8, 0.85, 0.9, 0.91, 0.95, 0.99, 1.0):
        budget = plans.budget(round(20 * GIB * margin), margin=margin)
        subject = Judge(budget=budget, forecast=GUESSED)
        found.append(subject.largest(STAGE, SIZES, recipe=Recipe()).tight or 0)
    assert found == sorted(found) and found[0] < found[-1]


def test_the_reason_for_caution_has_its_figures() -> None:
    assert judge(GUESSED, margin=0.95).caution(STAGE) == (
        "a margin of 95 % spares 5 %, and the kernels of this GPU have not been measured"
    )


def test_evaluation_through_the_same_loader_bounds_the_batch() -> None:
    subject = judge(ToyForecast(evaluation_share=1.0))
    recipe = Recipe(checkpointing=True)
    alone = subject.largest(STAGE, SIZES, recipe=recipe)
    evaluation = subject.largest(STAGE, SIZES, recipe=evaluation_recipe(STAGE))
    assert alone.tight is not None and evaluation.tight is not None and evaluation.tight < alone.tight
    assert subject.largest_of_loader(STAGE, SIZES, recipe=recipe) == least([alone, evaluation])
    own = plans.stage(eval_batch_size=4)
    assert subject.largest_of_loader(own, SIZES, recipe=recipe) == alone


def test_the_least_of_all_is_none_where_one_is() -> None:
    five, none = BatchBounds(safe=5, tight=6), BatchBounds(safe=None, tight=7)
    assert least([five, none]) == BatchBounds(safe=None, tight=6)


def test_sizes_are_the_jobs_own_with_the_stages_over_them() -> None:
    stage = plans.stage(sizes={"n_negatives": 24, "unknown": 3})
    forecast = ToyForecast(sizes={"batch_size": 8, "n_negatives": 1, "length": 128})
    assert job_sizes(stage, forecast, batch_size=2) == {"batch_size": 2, "n_negatives": 24, "length": 128}
    assert job_sizes(stage, forecast, batch_size=2, over={"n_negatives": 5})["n_negatives"] == 5


def test_evaluation_keeps_nothing_of_training_but_its_precision() -> None:
    stage = plans.stage(precision="bf16", checkpointing=True)
    assert evaluation_recipe(stage) == Recipe(precision="bf16", mode="evaluate")


def machine(*free_bytes: int, total_bytes: int = 80 * GIB) -> Snapshot:
    gpus = tuple(
        GpuSnapshot(
            index=i,
            name="NVIDIA A100-SXM4-80GB",
            uuid=f"GPU-{i}",
            memory_total_bytes=total_bytes,
            memory_free_bytes=free,
        )
        for i, free in enumerate(free_bytes)
    )
    return Snapshot(taken_at_s=0.0, gpus=gpus)


def test_the_margin_is_of_what_is_free_and_not_of_the_total() -> None:
    budget = find_budget(margin=0.5, read=lambda: machine(20 * GIB))
    assert (budget.total_bytes, budget.free_bytes.value, budget.usable_bytes) == (
        80 * GIB,
        20 * GIB,
        10 * GIB,
    )
    assert (budget.free_bytes.source, budget.free_bytes.reason) == (
        "measured",
        "the driver reports it for GPU 0",
    )
    assert budget.device.datasheet == "A100-SXM4-80GB"


@pytest.mark.parametrize(("ranks", "expected"), [(1, 30), (2, 20), (3, 10), (8, 10)])
def test_of_several_ranks_the_fullest_gpu_decides(ranks: int, expected: int) -> None:
    budget = find_budget(ranks=ranks, read=lambda: machine(30 * GIB, 20 * GIB, 10 * GIB))
    assert budget.free_bytes.value == expected * GIB


def test_a_gpu_that_is_not_here_is_empty() -> None:
    budget = find_budget(gpu="A100-80GB", margin=0.85)
    assert budget.total_bytes == budget.free_bytes.value == budget.device.memory_bytes
    assert budget.usable_bytes == int(budget.total_bytes * 0.85)
    assert budget.free_bytes.source == "datasheet"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GB", 23028 * MIB), ("24", 23028 * MIB), ("24GiB", 24 * GIB), ("1.5", 1_500_000_000)],
)
def test_an_amount_of_memory(text: str, expected: int) -> None:
    assert find_budget(gpu_memory=text).total_bytes == expected


def test_a_size_that_cards_are_sold_with_is_what_they_have() -> None:
    assert "what A10 has, the least of cards sold with 24GB" in find_budget(gpu_memory="24").free_bytes.reason


def test_a_device_smaller_than_a_context_is_refused() -> None:
    with pytest.raises(BadInput, match=r"500MB offers .*, and a CUDA context alone takes about 600 MiB"):
        find_budget(gpu_memory="500MB")


def test_a_gpu_without_cuda_is_planned_by_its_rules_and_says_so() -> None:
    said = leaning_notes([], ToyForecast(), find_budget(gpu="MI300X"))
    assert said[0].startswith("MI300X: the rules of CUDA and its libraries were used")
    assert leaning_notes([], ToyForecast(), find_budget(gpu="A100-80GB")) == ()


def test_without_a_gpu_it_says_why_and_what_to_do() -> None:
    nothing = Snapshot(taken_at_s=0.0, missing={"gpus": "no NVIDIA driver"})
    with pytest.raises(
        BadInput, match=r"no GPU to plan for: no NVIDIA driver .*--gpu A100-80GB or --gpu-memory 24GB"
    ):
        find_budget(read=lambda: nothing)
    with pytest.raises(BadInput, match="the driver sees no GPU"):
        find_budget(read=lambda: Snapshot(taken_at_s=0.0))


@pytest.mark.parametrize("margin", [0.0, -1.0, 1.01, float("nan")])
def test_a_margin_that_is_no_share(margin: float) -> None:
    with pytest.raises(BadInput, match="is not a share of the free memory"):
        find_budget(gpu="A100-80GB", margin=margin)


def test_two_devices_or_an_unknown_one() -> None:
    with pytest.raises(BadInput, match="--gpu and --gpu-memory name two devices"):
        find_budget(gpu="A100-80GB", gpu_memory="24GB")
    with pytest.raises(UnknownDevice):
        find_budget(gpu="A1000-80GB")
    with pytest.raises(BadInput, match=r"--gpu-memory 'lots' is not a size .*24GB"):
        find_budget(gpu_memory="lots")


def test_a_straight_line_is_a_forecast() -> None:
    forecast: Forecast = ToyForecast()
    sizes = {"batch_size": 3, "n_negatives": 1}
    largest = forecast.largest_within(sizes, recipe=Recipe(), capacity_bytes=10 * GIB)
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
