"""Traces come from a store, from a replay or are made, each once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.ground.errors import BadInput
from flatout.hardware.simulated import simulated_device
from flatout.memory.jobs.job import Recipe, Sizes
from flatout.memory.predict.forecast import (
    Forecaster,
)
from flatout.memory.predict.replay import with_own_sizes
from flatout.memory.predict.steps import TracedSteps
from flatout.memory.trace.record import Trace
from flatout.planner.forecast.trace_cache import TraceCache
from tests.support.memory import job_of, mlp_job, tower, traced

MIB = 1 << 20


def forecast(**options: Any) -> Forecaster:
    return Forecaster(tower(), **{"device": simulated_device("A100-80GB"), **options})


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
    assert found.num_bytes.tolist() == with_own_sizes(traced(job, batch_size=5)).num_bytes.tolist()
    assert len(messages) == 2
    assert messages[0].startswith("tracing job, fp32, train")
    forecaster.what_if(Recipe(), sizes={"batch_size": 5})
    assert len(messages) == 2  # traces are kept


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
        fresh = with_own_sizes(traced(job, device=forecaster.device, **sizes))
        assert replayed.num_bytes.tolist() == fresh.num_bytes.tolist()
        assert replayed.sizes == sizes
    assert len(messages) == 1  # six small traces at once, and none for any of these
    assert messages[0].count(",") >= 5
    between = {"batch_size": 9, "length": 50}  # which the knobs do not cover
    assert forecaster.what_if(Recipe(), sizes=between).sizes == between
    assert len(messages) > 1


def test_a_knob_is_a_size_of_the_job() -> None:
    with pytest.raises(BadInput, match="negatives is not a size of"):
        Forecaster(mlp_job(), knobs=("negatives",))


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


def test_native_traces_are_stored_apart_and_only_for_a_known_kind_of_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    store = TraceCache("job", folder=tmp_path)
    plain, native = forecast(store=store), forecast(store=store, native=True)
    of_no_kind = forecast(store=store, native=True, device=simulated_device("24GB"))
    conditions = [each._conditions(Recipe(), {"batch_size": 8}, quick=False) for each in (plain, native)]
    assert conditions[0] != conditions[1]
    assert native.store is store and of_no_kind.store is None


def test_a_second_forecast_traces_nothing(tmp_path: Path) -> None:
    answers = []
    for _ in range(2):
        subject = forecast(store=TraceCache("tower", folder=tmp_path))
        largest = subject.largest_within({"width": 32}, recipe=Recipe(), capacity_bytes=1500 * MIB)
        peak = subject.peak_bytes({"batch_size": 8, "width": 32}, recipe=Recipe(mode="evaluate"))
        answers.append((subject.num_traced, largest, peak))
    (first, *once), (second, *again) = answers
    assert once == again
    assert first >= 5 and second == 0


def test_another_amount_of_memory_starts_from_the_same_traces(tmp_path: Path) -> None:
    made = []
    for device in ("24GB", "48GB", "A100-80GB"):
        store = TraceCache("tower", folder=tmp_path)
        subject = Forecaster(tower(), device=simulated_device(device), store=store)
        subject.peak_bytes({"batch_size": 8, "width": 32}, recipe=Recipe())
        made.append(subject.num_traced)
    assert made == [1, 0, 1]


def test_a_device_and_ranks_of_other_kinds_are_refused() -> None:
    with pytest.raises(BadInput, match="device=80 is not the name of a GPU"):
        TracedSteps(tower(), device=80)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="ranks='2'"):
        TracedSteps(tower(), ranks="2")  # type: ignore[arg-type]
