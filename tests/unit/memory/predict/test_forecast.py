"""Forecasts: replayed as traced, and the largest batch is the largest."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from flatout.errors import BadInput
from flatout.hardware.simulated import simulated_device
from flatout.memory.jobs.job import Job, Recipe, Sizes
from flatout.memory.predict.allocator import simulate
from flatout.memory.predict.estimate import add_workspaces
from flatout.memory.predict.forecast import (
    KEPT_FREE,
    SCATTER,
    Forecaster,
    estimate_job,
    largest_batch,
)
from flatout.memory.predict.repeat_steps import repeated
from flatout.memory.predict.replay import sized
from flatout.memory.trace.record import Trace
from tests.support.memory import job_of, language_model_job, mlp_job, traced

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
    fresh = sized(traced(forecaster.job, recipe, device=forecaster.device, batch_size=batch_size))
    assert replayed.num_bytes.tolist() == fresh.num_bytes.tolist()
    assert replayed.peak_allocated_bytes() == fresh.peak_allocated_bytes()
    assert replayed.sizes == {"batch_size": batch_size, "length": 64}


def reserved_at(job: Job, batch_size: int, cap_bytes: int, *, recipe: Recipe | None = None) -> bool:
    """Whether a fresh trace at `batch_size` stays within `cap_bytes` without a flush."""
    log = add_workspaces(sized(traced(job, recipe, batch_size=batch_size)))
    done = simulate(log.events, log.num_bytes, cap_bytes=cap_bytes)
    return done.out_of_memory_at is None and not done.num_flushes


@pytest.mark.parametrize("cap_bytes", [150 * MIB, 301 * MIB])
def test_the_largest_batch_fits_and_the_one_above_does_not(forecaster: Forecaster, cap_bytes: int) -> None:
    found = forecaster.largest_batch(Recipe(), cap_bytes=cap_bytes)
    assert found.limit >= found.tight >= found.safe > 1
    own = sized(forecaster.trace(Recipe(), {**forecaster.job.sizes, "batch_size": found.tight}))
    run = repeated(own, num_steps=6)
    assert run.flushes(cap_bytes=int(cap_bytes * (1 - KEPT_FREE))) is not None
    assert found.num_flushes is not None and found.num_flushes >= 0
    own = forecaster.trace(Recipe(), {**forecaster.job.sizes, "batch_size": found.safe})
    assert found.reserved_bytes == forecaster.simulate(sized(own)).peak_reserved_bytes <= cap_bytes
    assert not reserved_at(forecaster.job, found.safe + 1, int(cap_bytes * (1 - SCATTER)))


def test_what_does_not_fit_at_all_is_zero() -> None:
    found = largest_batch(mlp_job(), cap_bytes=1 * MIB)
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


class SizeDecides(nn.Module):
    """Another operation at every batch size: nothing to replay."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(len(x)):
            x = self.layer(x).relu()
        return x


def test_a_step_that_cannot_be_replayed_is_traced() -> None:
    messages: list[str] = []
    job = job_of(SizeDecides, lambda batch_size: torch.empty(batch_size, 64))
    forecaster = Forecaster(job, on_progress=messages.append)
    found = forecaster.what_if(Recipe(), sizes={"batch_size": 5})
    assert found.num_bytes.tolist() == sized(traced(job, batch_size=5)).num_bytes.tolist()
    assert len(messages) == 2
    assert messages[0].startswith("tracing job, fp32, train")
    forecaster.what_if(Recipe(), sizes={"batch_size": 5})
    assert len(messages) == 2  # traces are kept


def test_an_estimate_names_the_device_and_adds_the_context() -> None:
    found = estimate_job(mlp_job(), device="A100-80GB")
    assert found.device == simulated_device("A100-80GB").name
    assert found.context_bytes == 600 * MIB
    assert found.by_component["parameters"] >= 4 * 2 * (32 * 32 + 32)


def test_an_unknown_size_is_refused(forecaster: Forecaster) -> None:
    with pytest.raises(BadInput, match=r"negatives is no size of job .*batch_size, length"):
        forecaster.what_if(Recipe(), sizes={"negatives": 3})


def test_several_knobs_are_replayed_from_one_set_of_traces() -> None:
    messages: list[str] = []
    job = job_of(
        lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)),
        lambda batch_size, length: torch.randn(batch_size, length, 64),
        sizes={"batch_size": 8, "length": 64},
    )
    forecaster = Forecaster(job, device="H200", knobs=("length",), on_progress=messages.append)
    for batch_size, length in ((40, 48), (3, 64)):
        sizes = {"batch_size": batch_size, "length": length}
        replayed = forecaster.what_if(Recipe(), sizes=sizes)
        fresh = sized(traced(job, device=forecaster.device, **sizes))
        assert replayed.num_bytes.tolist() == fresh.num_bytes.tolist()
        assert replayed.sizes == sizes
    assert len(messages) == 1  # six small traces at once, and none for any of these
    assert messages[0].count(",") >= 5
    between = {"batch_size": 9, "length": 50}  # which the knobs do not cover
    assert forecaster.what_if(Recipe(), sizes=between).sizes == between
    assert len(messages) > 1


def test_a_knob_is_a_size_of_the_job() -> None:
    with pytest.raises(BadInput, match="negatives is no size of"):
        Forecaster(mlp_job(), knobs=("negatives",))


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
    with pytest.raises(BadInput, match="length is no size of"):
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
        step = sized(forecaster.trace(Recipe(), {"batch_size": batch_size}))
        assert forecaster.simulate(step, cap_bytes=200 * MIB).num_flushes == 0


def test_multiprocessors_that_are_assumed_are_said() -> None:
    unknown = estimate_job(mlp_job(), device="24GB")
    assert unknown.workspaces.source == "assumed"
    assert "\nworkspaces: sized for 132 multiprocessors; how many 24GB has is not known\n" in str(unknown)
    assert "multiprocessors" not in str(estimate_job(mlp_job(), device="A100-80GB"))


class FromElsewhere(Forecaster):
    """Brings traces of its own for the batches that it knows."""

    known: dict[int, Trace]

    def make_traces(self, recipe: Recipe, all_sizes: Iterable[Sizes], *, quick: bool = False) -> list[Trace]:
        found = []
        for sizes in all_sizes:
            made = self.known.get(sizes["batch_size"])
            found.append(made or super().make_traces(recipe, [sizes], quick=quick)[0])
        return found


def test_traces_can_come_from_elsewhere() -> None:
    forecaster = FromElsewhere(mlp_job())
    forecaster.known = {7: traced(mlp_job(), batch_size=3)}
    assert forecaster.estimate(Recipe(), sizes={"batch_size": 7}).sizes["batch_size"] == 3
    assert forecaster.estimate(Recipe(), sizes={"batch_size": 5}).sizes["batch_size"] == 5
