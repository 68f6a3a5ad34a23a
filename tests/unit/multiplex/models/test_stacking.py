from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from flatout.ground.errors import BadInput
from flatout.multiplex.models.stacking import stacked, transposed


class Three(nn.Module):
    def __init__(self, *, biases: tuple[bool, bool, bool] = (True, True, True)) -> None:
        super().__init__()
        self.q = nn.Linear(6, 8, bias=biases[0])
        self.k = nn.Linear(6, 4, bias=biases[1])
        self.v = nn.Linear(6, 4, bias=biases[2])


def outputs(model: Three, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([model.q(x), model.k(x), model.v(x)], -1)


@torch.no_grad()
def test_parts_become_views_of_one_product() -> None:
    model, x = Three(), torch.randn(5, 6)
    wanted = outputs(model, x)
    product = stacked(model, ["q", "k", "v"])
    assert product.name == "q+k+v"
    assert product.parts == (("q", 8), ("k", 4), ("v", 4))
    torch.testing.assert_close(nn.functional.linear(x, product.weight, product.bias), wanted)
    product.weight[9].fill_(3.0)
    assert bool((model.k.weight[1] == 3).all())


def test_the_parameter_stays_the_same_object() -> None:
    """An optimizer that holds the parameter goes on training the stacked weight."""
    model = Three()
    parameter = model.k.weight
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    product = stacked(model, ["q", "k", "v"])
    before = product.weight.clone()
    model.k(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    assert model.k.weight is parameter
    torch.testing.assert_close(product.weight[8:12], before[8:12] - 1)
    assert torch.equal(product.weight[:8], before[:8])


def test_stacking_twice_gives_the_same_storage() -> None:
    model = Three()
    first, second = stacked(model, ["q", "k", "v"]), stacked(model, ["q", "k", "v"])
    assert first.weight.data_ptr() == second.weight.data_ptr()
    assert first.bias is not None and second.bias is not None
    assert first.bias.data_ptr() == second.bias.data_ptr()
    assert torch.equal(first.weight, second.weight)


@torch.no_grad()
@pytest.mark.parametrize("biases", [(True, False, True), (False, False, True), (False, False, False)])
def test_a_missing_bias_is_zero(biases: tuple[bool, bool, bool]) -> None:
    model, x = Three(biases=biases), torch.randn(3, 6)
    wanted = outputs(model, x)
    product = stacked(model, ["q", "k", "v"])
    assert (product.bias is None) == (not any(biases))
    torch.testing.assert_close(nn.functional.linear(x, product.weight, product.bias), wanted)
    assert (model.k.bias is None) == (not biases[1])


@torch.no_grad()
def test_a_convolution_turns_its_storage() -> None:
    model, x = nn.Sequential(Conv1D(10, 6)), torch.randn(3, 6)
    wanted, weight = model(x), model[0].weight.clone()
    product = transposed(model, "0")
    assert product.weight.shape == (10, 6)
    assert product.weight.is_contiguous()
    torch.testing.assert_close(nn.functional.linear(x, product.weight, product.bias), wanted)
    assert torch.equal(model[0].weight, weight)
    assert transposed(model, "0").weight.data_ptr() == product.weight.data_ptr() == model[0].weight.data_ptr()


def test_a_module_of_another_kind_is_named() -> None:
    with pytest.raises(BadInput, match="0 is a Embedding, not a Linear"):
        stacked(nn.Sequential(nn.Embedding(2, 2)), ["0"])
    with pytest.raises(BadInput, match="0 has no weight"):
        transposed(nn.Sequential(nn.ReLU()), "0")
