"""What evolves in a model, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatout.engines.evolution.population.targets import (
    chosen,
    is_language_model,
    linear_weights,
    vectors,
)
from flatout.errors import BadInput
from flatout.multiplex.models.families import read_decoder
from tests.support.evolution import small_net, tiny_llama


def test_the_linear_layers_of_a_module_and_its_vectors() -> None:
    net = small_net()
    assert {name: tuple(weight.shape) for name, weight in linear_weights(net).items()} == {
        "0": (20, 6),
        "3": (3, 20),
    }
    assert list(vectors(net)) == ["0.bias", "1.weight", "1.bias", "3.bias"]


def test_a_transposed_layer_is_seen_as_out_by_in() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(5, 3)
    weight = linear_weights(nn.Sequential(layer))["0"]
    assert tuple(weight.shape) == (5, 3)
    weight.zero_()
    assert layer.weight.eq(0).all()


def test_patterns_choose_and_one_without_a_match_is_named() -> None:
    weights = {"a.mlp.up": torch.zeros(1), "a.attn.qkv": torch.zeros(1)}
    assert list(chosen(weights, ["*.mlp.*"])) == ["a.mlp.up"]
    assert list(chosen(weights, None)) == list(weights)
    with pytest.raises(BadInput, match=r"no target matches '\*\.mpl\.\*'"):
        chosen(weights, ["*.mlp.*", "*.mpl.*"])
    with pytest.raises(BadInput, match="no Linear layer"):
        chosen({}, None)


def test_what_generates_is_a_language_model() -> None:
    model = tiny_llama()
    assert is_language_model(model)
    assert is_language_model(read_decoder(model))
    assert not is_language_model(small_net())


def test_head_and_embedding_are_no_targets_and_stacked_products_are_one() -> None:
    names = list(read_decoder(tiny_llama()).projections())
    assert names == [
        "model.layers.0.self_attn.q_proj+k_proj+v_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_proj+up_proj",
        "model.layers.0.mlp.down_proj",
    ]
