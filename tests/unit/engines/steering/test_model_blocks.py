"""Finding the blocks of any family, and layers by number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatout.engines.steering.model_blocks import blocks_of, chosen_layers, hidden_of, input_device, width_of
from flatout.ground.errors import BadInput
from tests.support.multiplex import FAMILIES, shared_model, tiny_model


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_blocks_of_every_family_are_found(family: str) -> None:
    model = shared_model(family)
    blocks = blocks_of(model)
    assert len(blocks) == 2
    assert all("Layer" in type(block).__name__ or "Block" in type(block).__name__ for block in blocks)
    assert width_of(model) == 48
    assert input_device(model) == torch.device("cpu")


def test_models_without_blocks_or_order_are_refused() -> None:
    with pytest.raises(BadInput, match="no config"):
        blocks_of(nn.Linear(2, 2))
    both_ways = tiny_model("llama")
    both_ways.config.use_bidirectional_attention = True
    with pytest.raises(BadInput, match="not causal"):
        blocks_of(both_ways)
    deeper = tiny_model("llama")
    deeper.config.num_hidden_layers = 7
    with pytest.raises(BadInput, match="no list of 7 blocks"):
        blocks_of(deeper)


def test_layers_are_sorted_and_counted_from_either_end() -> None:
    assert chosen_layers("all", num_layers=3) == (0, 1, 2)
    assert chosen_layers([-1, 0, 0], num_layers=3) == (0, 2)
    with pytest.raises(BadInput, match=r"layer 3 was asked for .*0 to 2"):
        chosen_layers([0, 3], num_layers=3)
    with pytest.raises(BadInput, match="no layer"):
        chosen_layers([], num_layers=3)
    with pytest.raises(BadInput, match="'some' is unknown"):
        chosen_layers("some", num_layers=3)  # type: ignore[arg-type]


def test_hidden_states_come_alone_or_first_in_a_tuple() -> None:
    hidden = torch.zeros(1, 2, 3)
    assert hidden_of(hidden) is hidden
    assert hidden_of((hidden, None)) is hidden
    with pytest.raises(BadInput, match="not hidden states"):
        hidden_of({"hidden": hidden})
