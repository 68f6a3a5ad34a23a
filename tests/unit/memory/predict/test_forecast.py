"""Forecasts: replayed as traced, and the largest batch is the largest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.ground.errors import BadInput
from flatout.hardware.simulated import simulated_device
from flatout.memory.jobs import from_objects
from flatout.memory.jobs.job import Job, Recipe, Sizes
from flatout.memory.predict import forecast as forecast_module
from flatout.memory.predict.allocator import simulate
from flatout.memory.predict.forecast import (
    CONTEXT_BYTES,
    KEPT_FREE,
    SCATTER,
    Forecaster,
    caveats_of,
    estimate_job,
)
from flatout.memory.predict.repeat_steps import repeat_steps
from flatout.memory.predict.replay import with_own_sizes
from flatout.memory.probe.probe_results import ProbedBatch, ProbeResult
from flatout.memory.trace.record import Trace
from tests.support.memory import job_of, language_model_job, mlp_job, tower, traced

MIB = 1 << 20
RECIPES = [Recipe(), Recipe(precision="bf16", clip_norm=1.0)]


@pytest.fixture(scope="module")
def forecaster() -> Forecaster:
    return Forecaster(language_model_job(), device="H200")


@pytest.mark.parametrize("recipe", RECIPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("batch_size", [3, 37])
def test_what_if_is_a_fresh_trace_to_the_byte(
    forecaster: Forecaster, recipe: Recipe, batch_size: int
) -> None:
    replayed = forecaster.what_if(recipe, sizes={"batch_size": batch_size})
    fresh = with_own_sizes(traced(forecaster.job, recipe, device=forecaster.device, batch_size=batch_size))
    assert replayed.num_bytes.tolist() == fresh.num_bytes.tolist()
    assert replayed.peak_allocated_bytes() == fresh.peak_allocated_bytes()
    assert replayed.sizes == {"batch_size": batch_size, "length": 64}


def reserved_at(job: Job, batch_size: int, cap_bytes: int, *, recipe: Recipe | None = None) -> bool:
    """Whether a fresh trace at `batch_size` stays within `cap_bytes` without a flush."""
    step = with_own_sizes(traced(job, recipe, batch_size=batch_size))
    done = simulate(step.trace.events, step.num_bytes, cap_bytes=cap_bytes)
    return done.out_of_memory_at is None and not done.num_flushes


@pytest.mark.parametrize("cap_bytes", [150 * MIB, 301 * MIB])
def test_the_largest_batch_fits_and_the_one_above_does_not(forecaster: Forecaster, cap_bytes: int) -> None:
    found = forecaster.largest_batch(Recipe(), cap_bytes=cap_bytes)
    assert found.limit >= found.tight >= found.safe > 1
    own = with_own_sizes(forecaster.trace(Recipe(), {**forecaster.job.sizes, "batch_size": found.tight}))
    run = repeat_steps(own, num_steps=6)
    assert run.flushes(cap_bytes=int(cap_bytes * (1 - KEPT_FREE))) is not None
    assert found.num_flushes is not None and found.num_flushes >= 0
    own = forecaster.trace(Recipe(), {**forecaster.job.sizes, "batch_size": found.safe})
    assert found.reserved_bytes == forecaster.simulate(with_own_sizes(own)).peak_reserved_bytes <= cap_bytes
    assert not reserved_at(forecaster.job, found.safe + 1, int(cap_bytes * (1 - SCATTER)))


def test_what_does_not_fit_at_all_is_zero() -> None:
    found = Forecaster(mlp_job()).largest_batch(Recipe(), cap_bytes=1 * MIB)
    assert (found.safe, found.limit, found.reserved_bytes) == (0, 0, None)
    assert (found.tight, found.num_flushes) == (0, None)


class Experts(nn.Module):
    """Rows go to the expert that scores highest: as many operations as there are experts in use."""

    def __init__(self, width: int = 64, num_experts: int = 4) -> None:
        super().__init__()
        self.score = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.score(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_a_model_that_shares_out_its_rows_is_answered() -> None:
    job = job_of(Experts, lambda batch_size: torch.empty(batch_size, 64), sizes={"batch_size": 8})
    cap_bytes = 80 * MIB
    forecaster = Forecaster(job)
    found = forecaster.largest_batch(Recipe(), cap_bytes=cap_bytes)
    assert found.safe > 8
    assert reserved_at(job, found.safe, cap_bytes)
    guesses = forecaster.estimate(Recipe()).guesses
    assert any("equally often" in str(guess) for guess in guesses)


class LowRank(nn.Module):
    """A frozen layer and a trained change of low rank."""

    def __init__(self, width: int = 64, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def test_a_low_rank_change_of_a_frozen_model_is_answered() -> None:
    job = job_of(LowRank, lambda batch_size: torch.empty(batch_size, 64))
    cap_bytes = 80 * MIB
    found = Forecaster(job).largest_batch(Recipe(), cap_bytes=cap_bytes)
    assert found.safe > 1
    assert reserved_at(job, found.safe, cap_bytes)


def test_an_estimate_names_the_device_and_adds_the_context() -> None:
    found = estimate_job(mlp_job(), device="A100-80GB")
    assert found.device == simulated_device("A100-80GB").name
    assert found.context_bytes == 600 * MIB
    assert found.by_component["parameters"] >= 4 * 2 * (32 * 32 + 32)


def test_an_unknown_size_is_refused(forecaster: Forecaster) -> None:
    with pytest.raises(BadInput, match=r"negatives is not a size of job .*batch_size, length"):
        forecaster.what_if(Recipe(), sizes={"negatives": 3})


def test_of_a_histogram_the_longest_decides() -> None:
    job = job_of(
        lambda: nn.Linear(64, 256),
        lambda batch_size, length: torch.randn(batch_size, length, 64),
        sizes={"batch_size": 8, "length": 16},
    )
    lengths = {16: 1000, 48: 3, 64: 0}
    forecaster = Forecaster(job)
    assert forecaster.estimate(Recipe(), lengths=lengths).sizes == {"batch_size": 8, "length": 48}
    decided = forecaster.largest_batch(Recipe(), cap_bytes=200 * MIB, lengths=lengths)
    assert decided == forecaster.largest_batch(Recipe(), cap_bytes=200 * MIB, sizes={"length": 48})
    assert decided.safe > 8
    with pytest.raises(BadInput, match="length is not a size of"):
        estimate_job(mlp_job(), lengths=lengths)


def test_expandable_segments_are_simulated_in_every_answer() -> None:
    answers = []
    forecaster = Forecaster(mlp_job(width=512))  # the same traces, simulated in two ways
    for switch in (False, True):
        forecaster.expandable_segments = switch
        found = forecaster.estimate(Recipe(), sizes={"batch_size": 20_000})
        assert found.peak_allocated_bytes <= found.peak_reserved_bytes
        largest = forecaster.largest_batch(Recipe(), cap_bytes=200 * MIB)
        assert 0 < largest.safe <= largest.limit
        answers.append((found.peak_reserved_bytes, largest.reserved_bytes))
    plain, expandable = answers
    assert expandable[0] < plain[0]
    assert expandable[1] != plain[1]


def test_no_answer_flushes_under_expandable_segments() -> None:
    """Where nothing is free, a request is held against the cap as a whole, though free pages serve a part."""
    forecaster = Forecaster(mlp_job(width=512), expandable_segments=True)
    largest = forecaster.largest_batch(Recipe(), cap_bytes=200 * MIB)
    assert 0 < largest.safe <= largest.tight and largest.num_flushes == 0
    for batch_size in (largest.safe, largest.tight):
        step = with_own_sizes(forecaster.trace(Recipe(), {"batch_size": batch_size}))
        assert forecaster.simulate(step, cap_bytes=200 * MIB).num_flushes == 0


def test_multiprocessors_that_are_assumed_are_said() -> None:
    unknown = estimate_job(mlp_job(), device="24GB")
    assert "\nnote: the number of multiprocessors of 24GB is unknown; workspaces are assumed" in str(unknown)
    assert "multiprocessors" not in str(estimate_job(mlp_job(), device="A100-80GB"))


class Kept(dict[str, Trace]):
    """Traces of the tower that one test made and another may ask for."""

    def find(self, conditions: object) -> Trace | None:
        return self.get(repr(conditions))

    def keep(self, conditions: object, trace: Trace) -> None:
        self[repr(conditions)] = trace


TRACES = Kept()


def forecast(**options: Any) -> Forecaster:
    options = {"device": simulated_device("A100-80GB"), "store": TRACES, **options}
    return Forecaster(tower(), **options)


def test_a_peak_is_the_estimate_of_the_same_step() -> None:
    found = forecast().peak_bytes({"batch_size": 40, "width": 32}, recipe=Recipe())
    fresh = estimate_job(tower(), Recipe(), sizes={"batch_size": 40, "width": 32}, device="A100-80GB")
    assert found.allocated_bytes == fresh.peak_allocated_bytes
    assert found.reserved_bytes == fresh.peak_reserved_bytes
    assert found.process_bytes > found.reserved_bytes


def test_the_largest_batch_fits_and_one_much_larger_does_not() -> None:
    subject = forecast()
    capacity = 1500 * MIB
    found = subject.largest_within({"width": 32}, recipe=Recipe(), capacity_bytes=capacity)
    assert found.safe is not None and found.tight is not None
    assert found.safe <= found.tight
    at = subject.peak_bytes({"batch_size": found.safe, "width": 32}, recipe=Recipe())
    above = subject.peak_bytes({"batch_size": round(found.tight * 1.2), "width": 32}, recipe=Recipe())
    assert at.process_bytes <= capacity < above.process_bytes


def test_what_is_recommended_trains_within_the_capacity_and_no_more_does() -> None:
    """Also from traces of these very sizes, which a second forecast makes."""
    capacity, sizes = 1500 * MIB, {"batch_size": 1, "width": 32}
    subject = forecast()
    tight = subject.largest_within(sizes, recipe=Recipe(), capacity_bytes=capacity).tight
    assert tight is not None
    for batch_size, trains in ((1, True), (tight // 2, True), (tight, True), (round(tight * 1.03), False)):
        at = {**sizes, "batch_size": batch_size}
        for asked in (subject, forecast()):
            assert asked.trains(at, recipe=Recipe(), capacity_bytes=capacity) is trains
    assert not subject.trains(sizes, recipe=Recipe(), capacity_bytes=100 * MIB)


def test_what_a_real_run_held_beside_the_traces_is_taken_from_the_capacity() -> None:
    """No GPU is here: the result of the run is written by hand, 200 MiB above what is traced."""
    capacity, sizes = 1500 * MIB, {"batch_size": 1, "width": 32}
    plain, probed = forecast(), forecast(profile=True)
    measured = []
    for batch_size in (2, 4):
        traced_at = plain.peak_bytes({**sizes, "batch_size": batch_size}, recipe=Recipe())
        measured.append(
            ProbedBatch(
                batch_size=batch_size,
                num_steps=2,
                peak_allocated_bytes=traced_at.allocated_bytes,
                peak_reserved_bytes=traced_at.reserved_bytes + 200 * MIB,
            )
        )
    parameters = sum(parameter.numel() for parameter in tower().make_model().parameters())
    result = ProbeResult(
        device="A100-SXM4-80GB", torch_version="2", other_sizes={"width": 32},
        num_parameters=parameters, num_trainable=parameters, context_bytes=CONTEXT_BYTES - 100 * MIB,
        probes=tuple(measured),
    )  # fmt: skip
    probed._probe_results[Recipe(), (("width", 32),)] = result
    found = probed.largest_within(sizes, recipe=Recipe(), capacity_bytes=capacity)
    expected = plain.largest_within(sizes, recipe=Recipe(), capacity_bytes=capacity - 100 * MIB)
    assert found == expected
    assert found.tight is not None
    for batch_size, trains in ((found.tight, True), (round(found.tight * 1.03), False)):
        at = {**sizes, "batch_size": batch_size}
        assert probed.trains(at, recipe=Recipe(), capacity_bytes=capacity) is trains
    assert plain.caveats and not probed.caveats


def test_a_device_smaller_than_a_context_takes_no_batch() -> None:
    found = forecast().largest_within({"width": 32}, recipe=Recipe(), capacity_bytes=100 * MIB)
    assert found.safe is None and found.tight is None


def test_the_setting_of_the_allocator_reaches_every_answer() -> None:
    sizes = {"batch_size": 40, "width": 32}
    subject = forecast(expandable_segments=True)
    largest = subject.largest_within(sizes, recipe=Recipe(), capacity_bytes=1500 * MIB)
    replayed = subject.peak_bytes(sizes, recipe=Recipe())
    fresh = estimate_job(tower(), Recipe(), sizes=sizes, device="A100-80GB", expandable_segments=True)
    fixed = estimate_job(tower(), Recipe(), sizes=sizes, device="A100-80GB")
    assert replayed.reserved_bytes == fresh.peak_reserved_bytes != fixed.peak_reserved_bytes
    assert largest.safe is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_native_forecast_is_refused_without_a_gpu() -> None:
    with pytest.raises(BadInput, match=r"^a native trace needs a CUDA GPU; "):
        forecast(native=True).peak_bytes({"batch_size": 8, "width": 32}, recipe=Recipe())


def test_a_batch_too_large_to_be_made_follows_from_small_ones() -> None:
    """Ten million rows of 32 KiB: nobody has the memory for the batch itself."""
    sizes = {"batch_size": 10_000_000, "width": 32}
    subject = forecast(store=None)
    found = subject.peak_bytes(sizes, recipe=Recipe(mode="evaluate"))
    assert found.allocated_bytes > 10_000_000 * 32 * 1024
    assert not subject.trains(sizes, recipe=Recipe(mode="evaluate"), capacity_bytes=80 * 10**9)
    assert subject.num_traced == 3


def test_seconds_are_unknown_without_a_probe() -> None:
    assert forecast().step_s({"batch_size": 8, "width": 32}, recipe=Recipe()) is None


def test_seconds_are_measured_at_the_very_batch_or_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is never timed by smaller ones; one that does not run has no time."""
    asked = []

    def fake_probe(job: Job, recipe: Recipe, *, sizes: Sizes, batch_sizes: Any = None) -> ProbeResult:
        asked.append(batch_sizes)
        if batch_sizes == (64,):
            raise BadInput("ran out of GPU memory")
        probes = tuple(
            ProbedBatch(
                batch_size=number, num_steps=3, peak_allocated_bytes=1, peak_reserved_bytes=1,
                micro_batch_s=1 + number / 10,
            )
            for number in batch_sizes or (1, 2)
        )  # fmt: skip
        return ProbeResult(
            device="GPU", torch_version="2", other_sizes={"width": 32}, num_parameters=1,
            num_trainable=1, context_bytes=1, probes=probes,
        )  # fmt: skip

    monkeypatch.setattr("flatout.memory.probe.run_probe.probe", fake_probe)
    probed = forecast(profile=True)
    seconds = [probed.step_s({"batch_size": size, "width": 32}, recipe=Recipe()) for size in (2, 54, 64, 54)]
    assert seconds == [1.2, 6.4, None, 6.4]
    assert asked == [None, (54,), (64,)]


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_of_nothing_is_refused(batch_size: int) -> None:
    with pytest.raises(BadInput, match=f"batch_size={batch_size} of .*: a step needs at least one sample"):
        forecast().estimate(Recipe(), sizes={"batch_size": batch_size})
    with pytest.raises(BadInput, match="a step needs at least one sample"):
        from_objects.job_of(nn.Linear(2, 2), lambda *, batch_size=batch_size: torch.ones(batch_size, 2))
    with pytest.raises(BadInput, match="a step needs at least one sample"):
        from_objects.job_of(nn.Linear(2, 2), torch.ones(0, 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_profiling_without_a_gpu_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match="GPU"):
        forecast(profile=True).peak_bytes({"batch_size": 8, "width": 32}, recipe=Recipe())


def test_a_peak_costs_one_trace_and_after_a_search_none() -> None:
    subject = forecast(store=None)
    subject.peak_bytes({"batch_size": 3, "width": 32}, recipe=Recipe())
    assert subject.num_traced == 1
    found = subject.largest_within({"width": 32}, recipe=Recipe(), capacity_bytes=1500 * MIB)
    searched = subject.num_traced
    for batch_size in (2, 9, 33, found.safe or 0):
        subject.peak_bytes({"batch_size": batch_size, "width": 32}, recipe=Recipe())
    assert subject.num_traced == searched


@pytest.mark.parametrize(("accumulation", "expected"), [(1, 1), (2, 2), (16, 2)])
def test_no_more_micro_batches_are_traced_than_memory_can_tell_apart(
    accumulation: int, expected: int
) -> None:
    recipe = Recipe(precision="bf16", accumulation=accumulation, clip_norm=1.0, checkpointing=True)
    assert forecast_module.limit_accumulation(recipe) == Recipe(
        precision="bf16", accumulation=expected, clip_norm=1.0, checkpointing=True
    )


H200 = simulated_device("H200")


class Routed(nn.Module):
    """Rows of a mask are taken, or the two experts of most weight."""

    def __init__(self, *, choose: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.choose = choose

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weights = self.gate(rows)
        if not self.choose:
            return rows[weights[:, 0] > 0].sum() + weights.sum()
        _, chosen = weights.topk(2)
        return sum((rows[(chosen == number).any(1)].sum() for number in range(4)), weights.sum())


def trace(*, choose: bool) -> Trace:
    job = Job(
        name="routed",
        make_model=lambda: Routed(choose=choose),
        make_batch=lambda *, batch_size: torch.zeros(batch_size, 16),
        loss=lambda model, batch: model(batch),
        sizes={"batch_size": 8},
    )
    return Forecaster(job, device=H200).trace(Recipe(), {"batch_size": 8})


def test_a_choice_that_was_answered_evenly_is_a_doubt() -> None:
    (doubt,) = caveats_of(trace(choose=True).guesses, device=H200)
    assert doubt == "what is computed depends on data in a place (every choice equally often)"


def test_the_largest_answer_there_can_be_is_none() -> None:
    guesses = trace(choose=False).guesses
    assert guesses
    assert caveats_of(guesses, device=H200) == ()


def test_a_gpu_that_nobody_measured_is_one_unless_the_job_ran_there() -> None:
    for name, words in (
        ("A100-80GB", "have not been measured"),
        ("24GB", "not known which kernels run on 24GB"),
    ):
        (doubt,) = caveats_of((), device=simulated_device(name))
        assert words in doubt
    assert caveats_of((), device=None) == ()
