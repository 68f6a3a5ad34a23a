"""A job is loaded, and its stored traces are found again; nothing is traced here."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flatout.errors import BadInput
from flatout.hardware.simulated import simulated_device
from flatout.memory.jobs.from_name import load_job
from flatout.planner.config.documents import Value
from flatout.planner.forecast import fingerprint
from flatout.planner.forecast.load import ForecastRequest, describe, load_forecast

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
        fingerprint,
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
