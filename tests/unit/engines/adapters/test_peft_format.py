"""Folders of PEFT: what we write PEFT loads with equal outputs, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flatout.engines.adapters.lora.bank import AdapterBank, AdapterSpec
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.peft_format import CONFIG, WEIGHTS, export, read
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


def test_our_folder_comes_back(tmp_path: Path) -> None:
    bank = filled(AdapterBank(bert(), specs(dropout=0.25)))
    export(bank, "b", tmp_path / "b", base_model_name="tiny", run=tmp_path)
    spec, tensors = read(tmp_path / "b")
    assert (spec.name, spec.rank, spec.scale, spec.dropout) == ("b", 24, bank.scales[1], 0.25)
    other = AdapterBank(bert(), [spec])
    other.load_state_dict("b", tensors)
    assert other.factors[0].equal(bank.factors[1, :24])


def test_an_adapter_that_peft_trained_with_a_head_is_read(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import RobertaForSequenceClassification

    model = roberta()
    whole = RobertaForSequenceClassification(model.config).eval()
    whole.roberta.load_state_dict(model.state_dict(), strict=False)
    theirs = get_peft_model(whole, LoraConfig(r=8, lora_alpha=12, target_modules=["query", "value"]))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    theirs.eval().save_pretrained(str(tmp_path / "peft.v1"))
    spec, tensors = read(
        tmp_path / "peft.v1", name="read", modules=[name for name, _ in model.named_modules()]
    )
    assert (spec.name, spec.rank, spec.scale) == ("read", 8, 1.5) and len(spec.targets) == 4
    bank = AdapterBank(model, [spec])
    bank.load_state_dict("read", tensors)
    (block,) = blocks()[:1]
    (states,) = ours(model, bank, (block,))
    expected = plain_states(whole.roberta, block)
    assert difference(states, expected, block) < 1e-5
    assert difference(plain_states(model, block), expected, block) > 1e-3
    with pytest.raises(BadInput, match="foreign"):
        bank.load_state_dict("read", read(tmp_path / "peft.v1")[1])


def written(folder: Path, config: object, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    save_file(tensors or {"x.lora_A.weight": torch.zeros(2, 2)}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "only LoRA"),
        ({"peft_type": "LORA", "r": 4, "rank_pattern": {"query": 8}}, "rank_pattern"),
        ({"peft_type": "LORA", "r": 4, "use_dora": True, "bias": "all"}, "use_dora, bias"),
        ([], "not a table"),
        ("{", "a folder that PEFT wrote"),
    ],
)
def test_folders_that_mean_something_else_are_refused(config: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        read(written(tmp_path / "a", config))


def test_folders_without_factors_are_refused(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4}
    with pytest.raises(BadInput, match="holds no factors"):
        read(written(tmp_path / "a", config, other=torch.zeros(1)))
    (tmp_path / "a" / WEIGHTS).write_bytes(b"cut")
    with pytest.raises(BadInput, match="never opened"):
        read(tmp_path / "a")
    with pytest.raises(BadInput, match="rank 0"):
        export(
            AdapterBank(bert(), [AdapterSpec(name="a", rank=0)]),
            "a",
            tmp_path,
            base_model_name="tiny",
            run=tmp_path,
        )
