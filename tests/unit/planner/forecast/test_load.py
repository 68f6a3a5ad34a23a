"""A job is loaded, and its stored traces are found again."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.api import apply_config, fit_config
from flatout.ground.errors import BadInput
from flatout.hardware.simulated import simulated_device
from flatout.memory.jobs.from_name import load_job
from flatout.memory.predict.forecast import Forecaster, estimate_job
from flatout.planner.config.config_text import Value
from flatout.planner.forecast import trace_cache
from flatout.planner.forecast.load import (
    VARIABLES,
    ForecastRequest,
    describe,
    find_segments,
    load_forecast,
    nest_keys,
    with_optimizer,
)
from flatout.planner.plan import PlanOptions
from tests.support.memory import tower

BUILD = """\
import torch
from torch import nn

def build(settings):
    def make_batch(*, batch_size, length=4):
        return torch.zeros(batch_size, length)
    return nn.Linear(settings["width"], 1), make_batch, lambda model, batch: model(batch).mean()

class Lit(nn.Module):
    def training_step(self, batch, index): ...
    def configure_optimizers(self): ...

def make_batch(*, batch_size, rows=3):
    return torch.zeros(batch_size, rows)
"""
numbers = itertools.count()


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    own = str(tmp_path)  # the tests' folders are no part of the job, and others may change them meanwhile
    monkeypatch.setattr(
        trace_cache,
        "loaded_modules",
        lambda: [each for each in sys.modules.values() if str(getattr(each, "__file__", "")).startswith(own)],
    )
    path = tmp_path / f"build_{next(numbers)}.py"
    path.write_text(BUILD)
    return path


def request(model: str, **options: Any) -> ForecastRequest:
    values = {"width": 4, "batch_size": 8}
    device = simulated_device("24GB")
    return ForecastRequest(model=model, device=device, values=values, **options)


def test_the_sizes_are_those_of_the_batch_maker(build: Path) -> None:
    assert load_forecast(request(f"{build}:build")).sizes == {"batch_size": 8, "length": 4}


def test_a_lightning_module_takes_a_batch_maker_from_elsewhere(build: Path) -> None:
    with pytest.raises(BadInput, match="neither make_batch nor example_input_array"):
        load_forecast(request(f"{build}:Lit"))
    found = load_forecast(request(f"{build}:Lit", make_batch=f"{build}:make_batch"))
    assert found.sizes == {"batch_size": 8, "rows": 3}


def test_a_config_folder_without_a_head_takes_a_task(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "max_position_embeddings": 64}')
    with pytest.raises(BadInput, match="names no architecture"):
        load_forecast(request(str(tmp_path)))
    found = load_forecast(request(str(tmp_path), task="masked-lm", cache=False))
    assert found.sizes == {"batch_size": 8, "length": 64}


def test_a_stage_that_trains_another_model_has_a_forecast_of_its_own(build: Path) -> None:
    stages: dict[str, dict[str, Value]] = {
        "01": {"width": 4, "batch_size": 8},
        "02": {"width": 4, "batch_size": 16, "digits": 3},
        "03": {"width": 6, "batch_size": 8},
        "04": {"width": 6, "batch_size": 8, "digits": 4},
    }
    said: list[str] = []
    found = load_forecast(
        request(f"{build}:build", stages=stages, keys_of=frozenset, on_progress=said.append)
    )
    one, two, three, four = (found.of_stage(name) for name in stages)
    assert one is two is found
    assert three is four is not found
    assert said == ["03 trains another model than 01"]


def test_stages_that_differ_in_what_is_varied_are_not_even_built(
    build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.planner.forecast.load.describe", lambda job: pytest.fail("it was built"))
    stages: dict[str, dict[str, Value]] = {
        "01": {"width": 4, "batch_size": 8, "length": 4},
        "02": {"width": 4, "batch_size": 4, "length": 8},
    }
    asked = request(f"{build}:build", stages=stages, keys_of=frozenset)
    assert load_forecast(dataclasses.replace(asked, values=stages["01"])).of_stage("02").sizes


def test_frozen_parameters_make_another_model(build: Path) -> None:
    job = load_job(f"{build}:build", settings={"width": 4})[0]

    def frozen() -> nn.Module:
        model = job.make_model()
        model.requires_grad_(False)
        return model

    assert describe(job) == describe(job)
    assert describe(dataclasses.replace(job, make_model=frozen)) != describe(job)


ON = "max_split_size_mb:128,expandable_segments:True"


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_environment_decides_and_is_named(variable: str) -> None:
    found = find_segments(environment={variable: ON})
    assert found.value and found.reason.startswith(f"{variable} ")


def test_the_older_variable_counts_only_where_the_other_is_not_set() -> None:
    both = {VARIABLES[0]: "expandable_segments:False", VARIABLES[1]: ON}
    assert not find_segments(environment=both).value


def test_without_a_setting_it_is_the_default() -> None:
    found = find_segments(environment={})
    assert (found.value, "default" in found.reason) == (False, True)


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_asked_for_counts_first(wanted: bool) -> None:
    found = find_segments(wanted, environment={VARIABLES[0]: ON})
    assert found.value is wanted and "expandable-segments was given" in found.reason


def test_a_probe_cannot_run_under_another_setting() -> None:
    assert find_segments(True, profile=True, environment={VARIABLES[1]: ON}).value
    with pytest.raises(BadInput, match="--expandable-segments cannot be measured"):
        find_segments(True, profile=True, environment={})


def test_the_environment_of_this_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not find_segments().value
    monkeypatch.setenv(VARIABLES[1], ON)
    assert find_segments().value


def test_dotted_keys_become_the_mapping_they_stand_for() -> None:
    assert nest_keys({"a.b": 1, "a.c.d": 2, "e": 3}) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    lists = nest_keys({"m.sizes.0": 64, "m.sizes.1": 32, "m.parts.0.k": 3, "m.epochs.0": 8, "m.epochs.4": 2})
    assert lists == {"m": {"sizes": [64, 32], "parts": [{"k": 3}], "epochs": {"0": 8, "4": 2}}}


def test_a_key_below_a_value_is_refused() -> None:
    with pytest.raises(BadInput, match=r"a\.b"):
        nest_keys({"a": 1, "a.b": 2})


def test_the_optimizer_a_config_names_is_planned() -> None:
    said: list[str] = []
    plain = with_optimizer(tower(), "sgd", on_progress=said.append)
    parts = plain.make_optimizer([nn.Parameter(torch.zeros(1))])
    assert isinstance(parts, torch.optim.SGD)
    assert not said
    bytes_of = {
        name: estimate_job(with_optimizer(tower(), name, on_progress=said.append)).by_component
        for name in ("sgd", "adamw_torch")
    }
    assert not bytes_of["sgd"].get("optimizer state")
    assert bytes_of["adamw_torch"]["optimizer state"] > 0


def test_an_unknown_optimizer_is_said_and_planned_as_adamw() -> None:
    said: list[str] = []
    subject = tower()
    assert with_optimizer(subject, "lion_8bit", on_progress=said.append) is subject
    assert "lion_8bit" in said[0]


NEGATIVES = """\
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
        trace_cache,
        "loaded_modules",
        lambda: [each for each in sys.modules.values() if str(getattr(each, "__file__", "")).startswith(own)],
    )
    conf = tmp_path / "conf"
    (conf / "curriculum").mkdir(parents=True)
    (conf / "config.yaml").write_text("batch_size: 8\naccumulation: 1024\n")
    for number, count in enumerate((24, 8, 8), start=1):
        (conf / "curriculum" / f"0{number}_stage.yaml").write_text(f"n_negatives: {count}\n")
    (tmp_path / "build.py").write_text(NEGATIVES)
    options = PlanOptions(model=f"{tmp_path / 'build.py'}:build", gpu_memory="2GB")
    made: list[Forecaster] = []

    def make(request: ForecastRequest) -> Forecaster:
        made.append(load_forecast(request))
        return made[-1]

    first = fit_config(conf, options, make_forecast=make)
    chosen = first.fit.groups[0].suggestion(None)
    assert chosen.effective_batches == {f"0{number}_stage": 8192 for number in (1, 2, 3)}
    assert chosen.peaks["02_stage"] == chosen.peaks["03_stage"] != chosen.peaks["01_stage"]
    assert fit_config(conf, options, make_forecast=make).to_json() == first.to_json()
    apply_config(first)
    assert fit_config(conf, options, make_forecast=make).edits == ()
    # One search of the worst stage, its evaluation twice, the others once; the model has no checkpointing.
    assert made[0].num_traced <= 3 + 2 + 2 + 1
    assert [forecast.num_traced for forecast in made[1:]] == [0, 0]
