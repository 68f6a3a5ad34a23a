"""Layers called by hand give the states of the model, and fused norms those of plain operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.encoder_layers import NormKernels, add_and_norm, added_norm, layers_of
from tests.support.adapters_packed import bert, blocks, difference, filled, roberta, specs


def forward(branch: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
    total = branch + residual
    return total, *torch.native_layer_norm(total, (total.shape[1],), weight, bias, eps)


def backward(
    first: Tensor, second: Tensor | None, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> Tensor:
    whole = first if second is None else first + second
    mask = [True, False, False]
    shape = (total.shape[1],)
    return torch.ops.aten.native_layer_norm_backward(whole, total, shape, mean, rstd, weight, None, mask)[0]


@pytest.mark.parametrize("readers", [(1.0, 2.0), (1.0, 0.0), (0.0, 3.0)])
def test_the_gradients_of_both_readers_arrive(readers: tuple[float, float]) -> None:
    norm = nn.LayerNorm(8).requires_grad_(False)
    nn.init.normal_(norm.weight)
    plain = NormKernels(forward, backward)  # type: ignore[arg-type]
    found = []
    for together in (True, False):
        torch.manual_seed(0)
        branch, residual = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
        pair = add_and_norm(norm, branch, residual, plain) if together else added_norm(norm, branch, residual)
        powers = zip(readers, pair, (2, 3), strict=True)
        used = [share * normed.pow(power).sum() for share, normed, power in powers if share]
        torch.stack(used).sum().backward()
        found.append((*pair, branch.grad, residual.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert found[0][2] is not None and found[0][2].any()


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
