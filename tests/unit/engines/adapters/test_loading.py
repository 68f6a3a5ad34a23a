"""An encoder comes from a folder, frozen and the same every time, or one line says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flatout.engines.adapters.loading import open_encoder, open_tokenizer
from flatout.engines.adapters.training.checkpoint import fingerprint
from flatout.errors import BadInput
from tests.support.adapters import save_tiny
from tests.support.evolution import save_tiny as save_tiny_llama

CPU = torch.device("cpu")


def test_an_encoder_is_frozen_and_the_same_every_time(tmp_path: Path) -> None:
    """The folder has no pooler; one drawn at random would make another model of it at every start."""
    folder = save_tiny(tmp_path / "tiny")
    first, second = open_encoder(folder, device=CPU), open_encoder(folder, device=CPU)
    assert fingerprint(first.named_parameters()) == fingerprint(second.named_parameters())
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert not first.training


def test_what_is_no_encoder_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no model folder at"):
        open_encoder(tmp_path / "absent", device=CPU)
    with pytest.raises(BadInput, match=r"has no config\.json"):
        open_encoder(tmp_path, device=CPU)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing-like-it"}))
    with pytest.raises(BadInput, match="no encoder that can be loaded") as caught:
        open_encoder(tmp_path, device=CPU)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match="no tokenizer that can be read"):
        open_tokenizer(save_tiny_llama(tmp_path / "llama"))


def test_a_folder_that_lacks_weights_is_said(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(BadInput, match=r"lacks \d+ weights of its encoder, first encoder\.layer\.1"):
        open_encoder(folder, device=CPU)


def test_a_tokenizer_must_pad(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    tokenizer = open_tokenizer(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(BadInput, match="no padding token"):
        open_tokenizer(folder)
