"""The fast path of a transformer layer in evaluation: PyTorch's own shapes, and what it holds inside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.memory import under_rules

BATCH, LENGTH, WIDTH, HEADS = 2, 128, 64, 4
SCORES = BATCH * HEADS * LENGTH * LENGTH


def evaluate(
    dtype: torch.dtype = torch.float32, masked: bool = False, norm_first: bool = False
) -> tuple[int, ...]:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=norm_first, activation="gelu"
    )
    layer = layer.eval().to(dtype)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool) if masked else None
    with torch.no_grad():
        return tuple(
            layer(torch.empty(BATCH, LENGTH, WIDTH, dtype=dtype), src_key_padding_mask=padding).shape
        )


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_gives_its_own_shape_and_scores_only_under_a_mask(masked: bool, norm_first: bool) -> None:
    made = under_rules(evaluate, torch.float32, masked, norm_first)
    assert made.result == (BATCH, LENGTH, WIDTH)
    assert bool(made.attention) is not masked
    assert (4 * SCORES in made.sizes_of("bmm")) is masked
    assert 4 * BATCH * LENGTH * 4 * WIDTH in made.sizes_of("gelu")


def test_half_precision_makes_scores_where_cudnn_would_be_taken() -> None:
    hopper, ampere = (
        under_rules(evaluate, torch.bfloat16, compute_capability=capability)
        for capability in ((9, 0), (8, 0))
    )
    assert 2 * SCORES in hopper.sizes_of("bmm")
    assert not ampere.sizes_of("bmm")
    assert any("flash" in name for name in ampere.attention)


def attend(need_weights: bool) -> list[tuple[int, ...]]:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x = torch.empty(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        rows, weights = layer(x, x, x, need_weights=need_weights)
    return [tuple(rows.shape), *([] if weights is None else [tuple(weights.shape)])]


def test_an_attention_alone_shows_its_weights_where_they_are_asked_for() -> None:
    plain = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x = torch.zeros(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        rows, weights = plain(x, x, x)
    assert under_rules(attend, True).result == [tuple(rows.shape), tuple(weights.shape)]
    assert under_rules(attend, False).result[0] == tuple(rows.shape)
