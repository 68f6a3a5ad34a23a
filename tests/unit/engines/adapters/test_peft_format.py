"""Folders of PEFT: what we write, PEFT loads with equal outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.adapters.lora.bank import AdapterBank, AdapterSpec
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.peft_format import export
from flatout.ground.errors import BadInput
from tests.support.adapters_packed import bert, blocks, difference, filled, plain_states, roberta, specs


def ours(model: Any, bank: AdapterBank, given: Any) -> Any:
    with PackedEncoder(model, bank) as encoder, torch.no_grad():
        return encoder(given)


@pytest.mark.parametrize("make", [bert, roberta])
def test_peft_gives_the_same_states_from_our_folder(make: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    model = make()
    bank = filled(AdapterBank(model, specs()))
    given = blocks()
    states = ours(model, bank, given)
    for name, block, own in zip(bank.names, given, states, strict=True):
        export(bank, name, tmp_path / name, base_model_name="tiny", run=tmp_path)
        theirs = PeftModel.from_pretrained(make(), str(tmp_path / name)).eval()
        assert difference(own, plain_states(theirs, block), block) < 1e-5
    assert not list(tmp_path.rglob("*.partial"))


def test_an_adapter_without_factors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="rank 0"):
        export(
            AdapterBank(bert(), [AdapterSpec(name="a", rank=0)]),
            "a",
            tmp_path,
            base_model_name="tiny",
            run=tmp_path,
        )
