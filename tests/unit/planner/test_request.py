"""A job is loaded, and its stored traces are found again; nothing is traced here."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import BadInput
from flatout.hardware.simulated import simulated_device
from flatout.planner.request import ForecastRequest, load_forecast

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
    path = tmp_path / f"build_{next(numbers)}.py"
    path.write_text(BUILD)
    return path


def request(model: str, **options: Any) -> ForecastRequest:
    values = {"width": 4, "batch_size": 8}
    device = simulated_device("24GB")
    return ForecastRequest(model=model, device=device, values=values, overrides={}, **options)


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
