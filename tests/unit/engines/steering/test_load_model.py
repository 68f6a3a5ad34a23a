"""A model folder is loaded whole, or refused by what it lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from flatout.engines.steering.load_model import check_model_folder, load_model
from flatout.ground.errors import BadInput
from tests.support.steering import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("steering")) / "model"


def test_a_folder_gives_a_model_that_runs(model: Path) -> None:
    loaded = load_model(model)
    assert next(loaded.model.parameters()).dtype == torch.float32
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer("is the sky blue ?")["input_ids"] == [5, 6, 10, 20, 2]
    half = load_model(model, dtype="bfloat16")
    assert next(half.model.parameters()).dtype == torch.bfloat16


def test_what_a_folder_lacks_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no model folder at"):
        check_model_folder(tmp_path / "absent")
    with pytest.raises(BadInput, match=r"no config\.json"):
        check_model_folder(tmp_path)
    without = tmp_path / "model"
    shutil.copytree(model, without)
    for path in without.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(BadInput, match=r"has no tokenizer .*save_pretrained"):
        load_model(without)


def test_a_folder_with_broken_weights_is_named(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    (broken / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(BadInput, match="no causal language model that can be loaded"):
        load_model(broken)
