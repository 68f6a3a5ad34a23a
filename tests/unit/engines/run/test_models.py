"""A folder is loaded whole and without a word, or one line says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.run.models import (
    capability_of,
    check_folder,
    choose_dtype,
    first_line,
    load_pretrained,
    open_tokenizer,
    quietly,
)
from flatout.ground.errors import BadInput
from flatout.hardware.matching import find_datasheet
from tests.support.evolution import save_tiny


def loaded(folder: Path, **options: Any) -> Any:
    return load_pretrained("AutoModelForCausalLM", folder, what="model", extra="steering", **options)


def test_a_whole_folder_is_loaded_quietly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny(tmp_path / "model")
    capfd.readouterr()
    assert loaded(folder).config.num_hidden_layers == 1
    assert capfd.readouterr().err == ""


def test_weights_that_a_folder_lacks_are_not_drawn_at_random(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny(tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 2}))
    capfd.readouterr()
    with pytest.raises(BadInput, match=r"model lacks \d+ weights of its model, first model\.layers\.1"):
        loaded(folder)
    assert "MISSING" not in capfd.readouterr().err
    assert loaded(folder, unread="layers.1.") is not None


def test_what_is_no_model_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no model folder at .*--model"):
        check_folder(tmp_path / "absent")
    with pytest.raises(BadInput, match=r"has no config\.json"):
        check_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="holds no model that can be loaded: "):
        loaded(tmp_path)
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


def test_what_the_user_chose_of_bars_and_words_stays(tmp_path: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    with quietly(extra="steering"):
        assert logging.get_verbosity() == logging.ERROR
    assert logging.get_verbosity() == before


@pytest.mark.parametrize(("gpu", "expected"), [("T4", "float16"), ("H200", "bfloat16")])
def test_a_gpu_gets_what_its_cores_multiply(gpu: str, expected: str) -> None:
    sheet = find_datasheet(gpu)
    assert sheet is not None
    major, minor = map(int, sheet.compute_capability.split("."))
    chosen = choose_dtype("auto", capability=(major, minor))
    assert (chosen.value, chosen.source) == (expected, "datasheet")
    assert sheet.compute_capability in chosen.reason


def test_before_tensor_cores_and_on_a_cpu_it_is_float32() -> None:
    assert choose_dtype("auto", capability=(6, 1)).value == "float32"
    assert choose_dtype("auto", capability=capability_of(torch.device("cpu"))).value == "float32"


def test_a_dtype_that_is_given_is_taken() -> None:
    assert choose_dtype("bfloat16", capability=None).value == "bfloat16"
    assert choose_dtype("float32", capability=(9, 0)).reason == "as given"


def test_a_folder_without_a_tokenizer_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no tokenizer that can be read: .*save_pretrained") as raised:
        open_tokenizer(save_tiny(tmp_path / "model"), extra="steering")
    assert "\n" not in str(raised.value)
