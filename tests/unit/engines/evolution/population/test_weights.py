"""What evolves in a model, by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatout.engines.evolution.population.weights import (
    CPU_NUMBERS,
    Stack,
    choose_weights,
    is_language_model,
    linear_weights,
    stacks_of,
    vectors,
)
from flatout.ground.errors import BadInput
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
    assert list(choose_weights(weights, ["*.mlp.*"])) == ["a.mlp.up"]
    assert list(choose_weights(weights, None)) == list(weights)
    with pytest.raises(BadInput, match=r"no target matches '\*\.mpl\.\*'"):
        choose_weights(weights, ["*.mlp.*", "*.mpl.*"])
    with pytest.raises(BadInput, match="no Linear layer"):
        choose_weights({}, None)


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


@given(
    st.lists(
        st.tuples(st.sampled_from([8, 300, 900]), st.sampled_from([8, 500]), st.booleans()), max_size=30
    ),
    st.sampled_from([1, 50, 4000]),
)
def test_every_matrix_lies_in_one_stack_of_its_kind(kinds: list[tuple[int, int, bool]], terms: int) -> None:
    weights = {
        str(number): torch.empty(out, width, dtype=torch.bfloat16 if narrow else torch.float32)
        for number, (out, width, narrow) in enumerate(kinds)
    }
    found = stacks_of(weights, terms=terms)
    assert sorted(name for names in found for name in names) == sorted(weights)
    for names in found:
        first = weights[names[0]]
        assert all(weights[name].shape == first.shape for name in names)
        assert all(weights[name].dtype == first.dtype for name in names)
        numbers = len(names) * (first.numel() + terms * sum(first.shape))
        assert len(names) == 1 or numbers <= CPU_NUMBERS


def test_small_matrices_are_few_stacks() -> None:
    weights = {str(number): torch.empty(32, 32) for number in range(200)}
    assert len(stacks_of(weights, terms=4)) == 1
    blocks = {f"{layer}.{part}": torch.empty(16, 8 + part) for layer in range(9) for part in range(4)}
    assert [len(names) for names in stacks_of(blocks, terms=2)] == [9] * 4


def test_a_part_is_a_view_and_a_matrix_has_its_own_scale() -> None:
    stack = Stack(torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 6), (0.5, 2.0))
    part = stack.part(range(1, 3))
    assert part.shrink.equal(stack.shrink[:, 1:3]) and part.expand.equal(stack.expand[:, 1:3])
    assert part.shrink.data_ptr() == stack.shrink[0, 1].data_ptr()
    assert part[1].scale == 2.0
    assert part[1].expand.equal(stack.expand[1, 1:3])
