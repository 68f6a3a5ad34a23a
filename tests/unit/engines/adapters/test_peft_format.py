"""Folders of PEFT: what we write, PEFT loads with equal outputs, and the other way round, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatout.engines.adapters.lora.bank import AdapterBank, AdapterSpec
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.peft_format import CONFIG, WEIGHTS, export, load_adapter, read_adapter
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
        export(bank, name, tmp_path / name, base_model_name="tiny")
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
        )


def of_peft(folder: Path, **options: Any) -> Any:
    """A PEFT model whose second factors are not zero, saved as a user saves it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        **{"r": 4, "lora_alpha": 7, "target_modules": ["query", "output.dense"], "lora_dropout": 0.0}
        | options
    )
    torch.manual_seed(0)
    theirs = get_peft_model(bert(), config)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(str(folder))
    return theirs.eval()


def bank_of(folder: Path, model: Any) -> AdapterBank:
    found = read_adapter(folder)
    bank = AdapterBank(
        model, [AdapterSpec(name="own", rank=found.rank, alpha=found.alpha, targets=found.targets)]
    )
    load_adapter(bank, "own", found)
    return bank


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"layers_to_transform": [1]}])
def test_an_adapter_of_peft_goes_in_and_out_again_bit_for_bit(options: Any, tmp_path: Path) -> None:
    theirs = of_peft(tmp_path / "in", **options)
    model = bert()
    bank = bank_of(tmp_path / "in", model)
    block = blocks()[0]
    (states,) = ours(model, bank, (block,))
    assert difference(states, plain_states(theirs, block), block) < 1e-5
    export(bank, "own", tmp_path / "out", base_model_name="tiny")
    before, after = (load_file(tmp_path / place / WEIGHTS) for place in ("in", "out"))
    assert before.keys() == after.keys() and all(before[key].equal(after[key]) for key in before)
    given, written = (json.loads((tmp_path / place / CONFIG).read_text()) for place in ("in", "out"))
    assert written["r"] == given["r"]
    assert written["lora_alpha"] == given["lora_alpha"] * (2 if options.get("use_rslora") else 1)


def test_an_adapter_from_under_a_classifier_of_transformers_goes_in_without_its_head(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import BertForSequenceClassification

    config = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    get_peft_model(BertForSequenceClassification(bert().config), config).save_pretrained(str(tmp_path))
    held = load_file(tmp_path / WEIGHTS)
    assert any("classifier" in name for name in held)
    bank = bank_of(tmp_path, bert())
    factor = held["base_model.model.bert.encoder.layer.0.attention.self.query.lora_A.weight"]
    assert bank.state_dict("own")["encoder.layer.0.attention.self.query.lora_A.weight"].equal(factor)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "an adapter of the type IA3, not LORA"),
        ({"use_dora": True}, "has use_dora=True"),
        ({"rank_pattern": {"query": 8}}, "has rank_pattern="),
        ({"bias": "all"}, "has bias='all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "has init_lora_weights='pissa"),
        ({"r": 8}, "has the rank 4, and adapter_config.json says 8"),
        ({"r": 0}, "has the rank 0"),
    ],
)
def test_what_is_not_plain_lora_is_refused_in_one_line(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    of_peft(tmp_path)
    path = tmp_path / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(BadInput) as caught:
        read_adapter(tmp_path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_weights_that_cannot_be_taken_are_refused_in_one_line(tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(BadInput) as caught:
            bank_of(tmp_path, bert())
        assert "\n" not in str(caught.value)
        return str(caught.value)

    of_peft(tmp_path)
    weights, held = tmp_path / WEIGHTS, load_file(tmp_path / WEIGHTS)
    first = next(name for name in held if "lora_A" in name)
    save_file({**held, first: torch.zeros(4, 99)}, weights)
    assert "has the width 99, the encoder" in refused()
    save_file({name: value for name, value in held.items() if name != first}, weights)
    assert "only one factor of layer.0" in refused()
    save_file({**held, "base_model.model.embeddings.lora_embedding_A": torch.zeros(4, 4)}, weights)
    assert "which is not a factor of a linear map" in refused()
    elsewhere = {name.replace("query", "question"): value for name, value in held.items()}
    save_file(elsewhere, weights)
    assert "which no linear map of the model ends with" in refused()
    weights.write_bytes(b"torn")
    assert "cannot be read" in refused()
    weights.unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert "a pickle executes what it holds" in refused()
    (tmp_path / CONFIG).unlink()
    assert "does not exist" in refused()
