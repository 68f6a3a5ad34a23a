"""The layers called one after another are the model, and only known families are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.encoder_layers import layers_of
from tests.support.adapters_packed import bert, blocks, difference, filled, roberta, specs


@pytest.mark.parametrize("make", [bert, roberta])
def test_states_and_gradients_are_those_of_the_models_own_forward(make: Any) -> None:
    given = blocks(types=make is bert)
    found = []
    for whole in (True, False):
        model = make()
        bank = filled(AdapterBank(model, specs()))
        with PackedEncoder(model, bank) as encoder:
            assert encoder._layers is not None and len(encoder._layers) == 2
            if whole:
                encoder._layers = None
            states = encoder(given)
            torch.stack([state.pow(2).mean() for state in states]).sum().backward()
        found.append((states, bank.gradients))
    for theirs, ours, block in zip(found[0][0], found[1][0], given, strict=True):
        assert difference(ours, theirs, block) < 1e-5
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)
    assert found[0][1].any()


def test_only_known_families_are_taken() -> None:
    from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel

    assert layers_of(DistilBertModel(DistilBertConfig(dim=16, n_heads=2, n_layers=1, hidden_dim=16))) is None
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    assert layers_of(BertModel(BertConfig(**sizes, is_decoder=True))) is None
    assert layers_of(BertModel(BertConfig(**sizes))) is not None


def test_a_model_that_changed_a_layer_runs_as_a_whole() -> None:
    """It calls itself BERT, but one of its layers does something more: its own forward is taken."""
    model = bert()
    layer = model.encoder.layer[1]
    plain = layer.forward

    def changed(*given: Any, **options: Any) -> Any:
        return plain(*given, **options) * 1.5

    layer.forward = changed
    given = blocks()
    expected = [
        model(input_ids=block.ids, attention_mask=block.mask().long()).last_hidden_state for block in given
    ]
    with PackedEncoder(model, AdapterBank(model, specs())) as encoder, torch.no_grad():
        assert encoder._layers is None
        for ours, theirs, block in zip(encoder(given, adapters=False), expected, given, strict=True):
            assert difference(ours, theirs, block) < 1e-4
