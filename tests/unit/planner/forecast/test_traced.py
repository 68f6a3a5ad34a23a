"""The planner's questions answered by traces of a small model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.api import apply_config, fit_config
from flatout.errors import BadInput
from flatout.hardware.simulated import simulated_device
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.predict.forecast import CONTEXT_BYTES, estimate_job
from flatout.memory.probe.probe_results import Measured, Receipt
from flatout.planner.forecast import fingerprint
from flatout.planner.forecast.load import ForecastRequest, load_forecast
from flatout.planner.forecast.trace_cache import TraceStore
from flatout.planner.forecast.traced import TracedForecast, nested, with_optimizer
from flatout.planner.plan import PlanOptions

MIB = 2**20


def job() -> Job:
    def make_batch(*, batch_size: int, width: int) -> Any:
        return torch.zeros(batch_size, width, 256)

    return Job(
        name="tower",
        make_model=lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)),
        make_batch=make_batch,
        loss=lambda model, batch: model(batch).square().mean(),
        sizes={"batch_size": 8, "width": 32},
    )


def forecast(**options: Any) -> TracedForecast:
    return TracedForecast(job(), **{"device": simulated_device("A100-80GB"), **options})


def test_a_peak_is_the_estimate_of_the_same_step() -> None:
    found = forecast().peak_bytes({"batch_size": 40, "width": 32}, recipe=Recipe())
    fresh = estimate_job(job(), Recipe(), sizes={"batch_size": 40, "width": 32}, device="A100-80GB")
    assert found.allocated_bytes == fresh.peak_allocated_bytes
    assert found.reserved_bytes == fresh.peak_reserved_bytes
    assert found.process_bytes > found.reserved_bytes


def test_the_largest_batch_fits_and_one_much_larger_does_not() -> None:
    subject = forecast()
    capacity = 1500 * MIB
    found = subject.largest_batch({"width": 32}, recipe=Recipe(), capacity_bytes=capacity)
    assert found.safe is not None and found.tight is not None
    assert found.safe <= found.tight
    at = subject.peak_bytes({"batch_size": found.safe, "width": 32}, recipe=Recipe())
    above = subject.peak_bytes({"batch_size": round(found.tight * 1.2), "width": 32}, recipe=Recipe())
    assert at.process_bytes <= capacity < above.process_bytes


def test_what_is_recommended_trains_within_the_capacity_and_no_more_does() -> None:
    """Also from traces of these very sizes, which a second forecast makes."""
    capacity, sizes = 1500 * MIB, {"batch_size": 1, "width": 32}
    subject = forecast()
    tight = subject.largest_batch(sizes, recipe=Recipe(), capacity_bytes=capacity).tight
    assert tight is not None
    for batch_size, trains in ((1, True), (tight // 2, True), (tight, True), (round(tight * 1.03), False)):
        at = {**sizes, "batch_size": batch_size}
        for asked in (subject, forecast()):
            assert asked.trains(at, recipe=Recipe(), capacity_bytes=capacity) is trains
    assert not subject.trains(sizes, recipe=Recipe(), capacity_bytes=100 * MIB)


def test_what_a_real_run_held_beside_the_traces_is_taken_from_the_capacity() -> None:
    """No GPU is here: the receipt of the run is written by hand, 200 MiB above what is traced."""
    capacity, sizes = 1500 * MIB, {"batch_size": 1, "width": 32}
    plain, probed = forecast(), forecast(profile=True)
    measured = []
    for batch_size in (2, 4):
        traced_at = plain.peak_bytes({**sizes, "batch_size": batch_size}, recipe=Recipe())
        measured.append(
            Measured(
                batch_size=batch_size,
                num_steps=2,
                peak_allocated_bytes=traced_at.allocated_bytes,
                peak_reserved_bytes=traced_at.reserved_bytes + 200 * MIB,
            )
        )
    parameters = sum(parameter.numel() for parameter in job().make_model().parameters())
    receipt = Receipt(
        device="A100-SXM4-80GB", torch_version="2", cuda_version=None, cudnn_version=None, job="tower",
        recipe=Recipe(), other_sizes={"width": 32}, num_parameters=parameters, num_trainable=parameters,
        context_bytes=CONTEXT_BYTES - 100 * MIB, probes=tuple(measured),
    )  # fmt: skip
    probed._receipts[Recipe(), (("width", 32),)] = receipt
    found = probed.largest_batch(sizes, recipe=Recipe(), capacity_bytes=capacity)
    expected = plain.largest_batch(sizes, recipe=Recipe(), capacity_bytes=capacity - 100 * MIB)
    assert found == expected
    assert found.tight is not None
    for batch_size, trains in ((found.tight, True), (round(found.tight * 1.03), False)):
        at = {**sizes, "batch_size": batch_size}
        assert probed.trains(at, recipe=Recipe(), capacity_bytes=capacity) is trains
    assert plain.doubts and not probed.doubts


def test_a_device_smaller_than_a_context_takes_no_batch() -> None:
    found = forecast().largest_batch({"width": 32}, recipe=Recipe(), capacity_bytes=100 * MIB)
    assert found.safe is None and found.tight is None


def test_the_setting_of_the_allocator_reaches_every_answer() -> None:
    sizes = {"batch_size": 40, "width": 32}
    subject = forecast(expandable_segments=True)
    largest = subject.largest_batch(sizes, recipe=Recipe(), capacity_bytes=1500 * MIB)
    replayed = subject.peak_bytes(sizes, recipe=Recipe())
    fresh = estimate_job(job(), Recipe(), sizes=sizes, device="A100-80GB", expandable_segments=True)
    fixed = estimate_job(job(), Recipe(), sizes=sizes, device="A100-80GB")
    assert replayed.reserved_bytes == fresh.peak_reserved_bytes != fixed.peak_reserved_bytes
    assert largest.safe is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_native_forecast_is_refused_without_a_gpu() -> None:
    with pytest.raises(BadInput, match=r"^a native trace needs a CUDA GPU; "):
        forecast(native=True).peak_bytes({"batch_size": 8, "width": 32}, recipe=Recipe())


def test_native_traces_are_stored_apart_and_only_for_a_known_kind_of_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    store = TraceStore("job", folder=tmp_path)
    plain, native = forecast(store=store), forecast(store=store, native=True)
    of_no_kind = forecast(store=store, native=True, device=simulated_device("24GB"))
    conditions = [
        each._forecaster._conditions(Recipe(), {"batch_size": 8}, quick=False) for each in (plain, native)
    ]
    assert conditions[0] != conditions[1]
    assert native._forecaster.store is store and of_no_kind._forecaster.store is None


def test_a_batch_too_large_to_be_made_follows_from_small_ones() -> None:
    """Ten million rows of 32 KiB: nobody has the memory for the batch itself."""
    sizes = {"batch_size": 10_000_000, "width": 32}
    subject = forecast()
    found = subject.peak_bytes(sizes, recipe=Recipe(mode="evaluate"))
    assert found.allocated_bytes > 10_000_000 * 32 * 1024
    assert not subject.trains(sizes, recipe=Recipe(mode="evaluate"), capacity_bytes=80 * 10**9)
    assert subject.num_traced == 3


def test_seconds_are_unknown_without_a_probe() -> None:
    assert forecast().step_s({"batch_size": 8, "width": 32}, recipe=Recipe()) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_profiling_without_a_gpu_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match="GPU"):
        forecast(profile=True).peak_bytes({"batch_size": 8, "width": 32}, recipe=Recipe())


def test_dotted_keys_become_the_mapping_they_stand_for() -> None:
    assert nested({"a.b": 1, "a.c.d": 2, "e": 3}) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    lists = nested({"m.sizes.0": 64, "m.sizes.1": 32, "m.parts.0.k": 3, "m.epochs.0": 8, "m.epochs.4": 2})
    assert lists == {"m": {"sizes": [64, 32], "parts": [{"k": 3}], "epochs": {"0": 8, "4": 2}}}


def test_a_key_below_a_value_is_refused() -> None:
    with pytest.raises(BadInput, match=r"a\.b"):
        nested({"a": 1, "a.b": 2})


def test_the_optimizer_a_config_names_is_planned() -> None:
    said: list[str] = []
    plain = with_optimizer(job(), "sgd", on_progress=said.append)
    parts = plain.make_optimizer([nn.Parameter(torch.zeros(1))])
    assert isinstance(parts, torch.optim.SGD)
    assert not said
    bytes_of = {
        name: estimate_job(with_optimizer(job(), name, on_progress=said.append)).by_component
        for name in ("sgd", "adamw_torch")
    }
    assert not bytes_of["sgd"].get("optimizer state")
    assert bytes_of["adamw_torch"]["optimizer state"] > 0


def test_an_unknown_optimizer_is_said_and_planned_as_adamw() -> None:
    said: list[str] = []
    subject = job()
    assert with_optimizer(subject, "lion_8bit", on_progress=said.append) is subject
    assert "lion_8bit" in said[0]


def test_a_second_forecast_traces_nothing(tmp_path: Path) -> None:
    answers = []
    for _ in range(2):
        subject = forecast(store=TraceStore("tower", folder=tmp_path))
        largest = subject.largest_batch({"width": 32}, recipe=Recipe(), capacity_bytes=1500 * MIB)
        peak = subject.peak_bytes({"batch_size": 8, "width": 32}, recipe=Recipe(mode="evaluate"))
        answers.append((subject.num_traced, largest, peak))
    (first, *once), (second, *again) = answers
    assert once == again
    assert first >= 5 and second == 0


def test_a_peak_costs_one_trace_and_after_a_search_none() -> None:
    subject = forecast()
    subject.peak_bytes({"batch_size": 3, "width": 32}, recipe=Recipe())
    assert subject.num_traced == 1
    found = subject.largest_batch({"width": 32}, recipe=Recipe(), capacity_bytes=1500 * MIB)
    searched = subject.num_traced
    for batch_size in (2, 9, 33, found.safe or 0):
        subject.peak_bytes({"batch_size": batch_size, "width": 32}, recipe=Recipe())
    assert subject.num_traced == searched


def test_another_amount_of_memory_starts_from_the_same_traces(tmp_path: Path) -> None:
    made = []
    for device in ("24GB", "48GB", "A100-80GB"):
        store = TraceStore("tower", folder=tmp_path)
        subject = TracedForecast(job(), device=simulated_device(device), store=store)
        subject.peak_bytes({"batch_size": 8, "width": 32}, recipe=Recipe())
        made.append(subject.num_traced)
    assert made == [1, 0, 1]


BUILD = """\
import torch
from torch import nn

def build(settings):
    def make_batch(*, batch_size, n_negatives=1):
        return torch.zeros(batch_size, 1 + n_negatives, 256)

    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    return model, make_batch, lambda model, batch: model(batch).square().mean()
"""


def test_a_curriculum_takes_few_traces_and_a_second_plan_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    own = str(tmp_path)  # the tests' folders are no part of the job, and others may change them meanwhile
    monkeypatch.setattr(
        fingerprint,
        "loaded_modules",
        lambda: [each for each in sys.modules.values() if str(getattr(each, "__file__", "")).startswith(own)],
    )
    conf = tmp_path / "conf"
    (conf / "curriculum").mkdir(parents=True)
    (conf / "config.yaml").write_text("batch_size: 8\naccumulation: 1024\n")
    for number, count in enumerate((24, 8, 8), start=1):
        (conf / "curriculum" / f"0{number}_stage.yaml").write_text(f"n_negatives: {count}\n")
    (tmp_path / "build.py").write_text(BUILD)
    options = PlanOptions(model=f"{tmp_path / 'build.py'}:build", gpu_memory="2GB")
    made: list[TracedForecast] = []

    def make(request: ForecastRequest) -> TracedForecast:
        made.append(load_forecast(request))
        return made[-1]

    first = fit_config(conf, options, make_forecast=make)
    chosen = first.fit.groups[0].suggestion(None)
    assert chosen.effective_batches == {f"0{number}_stage": 8192 for number in (1, 2, 3)}
    assert chosen.peaks["02_stage"] == chosen.peaks["03_stage"] != chosen.peaks["01_stage"]
    assert fit_config(conf, options, make_forecast=make).to_json() == first.to_json()
    apply_config(first)
    assert fit_config(conf, options, make_forecast=make).edits() == ()
    # One search of the worst stage, its evaluation twice, the others once; the model has no checkpointing.
    assert made[0].num_traced <= 3 + 2 + 2 + 1
    assert [forecast.num_traced for forecast in made[1:]] == [0, 0]
