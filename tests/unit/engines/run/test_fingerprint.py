"""Names that change with anything that changes a value, and with nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.engines.run import fingerprint
from flatout.engines.run.fingerprint import (
    check_model,
    model_fingerprint,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from flatout.ground.errors import BadInput
from tests.support.multiplex import tiny_model
from tests.support.steering import word_tokenizer


def changed(change: Callable[[Any], Any]) -> bool:
    model = tiny_model("llama")
    before = model_fingerprint(model)
    with torch.no_grad():
        change(model)
    return model_fingerprint(model) != before


def test_equal_models_have_equal_names(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert model_fingerprint(model) == model_fingerprint(copy.deepcopy(model)) == model_fingerprint(again)
    assert not changed(lambda model: model.requires_grad_(False))


def test_any_number_any_buffer_the_config_and_the_type_change_the_name() -> None:
    assert changed(lambda model: model.lm_head.weight.data[3, 5].add_(1e-3))
    assert changed(lambda model: model.model.rotary_emb.inv_freq.mul_(2))
    assert changed(lambda model: setattr(model.config, "rms_norm_eps", 0.5))
    assert changed(lambda model: model.to(torch.bfloat16))


def test_the_size_of_a_piece_does_not_change_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt2")
    before = model_fingerprint(model)
    monkeypatch.setattr(fingerprint, "CHUNK_BYTES", 100)
    assert model_fingerprint(model) == before


def test_an_adapter_switched_off_changes_the_name() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    active = model_fingerprint(model)
    with model.disable_adapter():
        assert model_fingerprint(model) != active
    assert model_fingerprint(model) == active


def test_a_tokenizer_is_named_by_how_it_cuts_text() -> None:
    assert tokenizer_fingerprint(word_tokenizer()) == tokenizer_fingerprint(word_tokenizer())
    assert tokenizer_fingerprint(word_tokenizer()) != tokenizer_fingerprint(word_tokenizer(start=True))

    class Slow:
        def __init__(self, word: str) -> None:
            self.word = word

        def get_vocab(self) -> dict[str, int]:
            return {self.word: 0}

    assert tokenizer_fingerprint(Slow("a")) == tokenizer_fingerprint(Slow("a"))
    assert tokenizer_fingerprint(Slow("a")) != tokenizer_fingerprint(Slow("b"))


def module(**changes: torch.Tensor) -> nn.Module:
    made = nn.Module()
    for name, value in {"a": torch.arange(5000.0), "b": torch.ones(2, 2), **changes}.items():
        made.register_parameter(name, nn.Parameter(value))
    return made


def test_weights_are_told_apart_by_values_shapes_types_and_names() -> None:
    others = [
        module(b=torch.ones(4)),
        module(b=torch.ones(2, 2, dtype=torch.bfloat16)),
        module(a=torch.arange(5000.0) + 1e-3),
        module(c=torch.ones(1)),
    ]
    assert weights_fingerprint(module()) == weights_fingerprint(module())
    assert len({weights_fingerprint(each) for each in (module(), *others)}) == 5


def test_a_checkpoint_of_another_model_is_refused() -> None:
    # What checkpoints held before every byte was hashed: a sample, with and without the dtypes.
    sampled = ["486f851a04c68a35", "5bef2c82ad73a1c1"]
    for saved in (weights_fingerprint(module()), *sampled):
        check_model(saved, module(), name="./mine", checkpoint="step-000003")
        with pytest.raises(BadInput, match=r"step-000003 belongs to a model other than \./other"):
            check_model(saved, module(b=torch.zeros(2, 2)), name="./other", checkpoint="step-000003")
