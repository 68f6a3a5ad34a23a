"""Packed attention against attention of each row alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.engines.adapters.lora.attention import (
    PACKED,
    bounds_of,
    choose_kernel,
    packed_attention,
    register,
    rows,
)
from flatout.engines.adapters.lora.token_blocks import layout
from flatout.ground.errors import BadInput
from tests.support.adapters_packed import blocks

HEADS, SIZE = 4, 8


def qkv(num_tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, num_tokens, SIZE, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("shapes", [((3, 7), (2, 12), (4, 5)), ((3, 7), (2, 7), (1, 4)), ((2, 6),)])
def test_a_row_attends_to_its_own_real_tokens(shapes: tuple[tuple[int, int], ...]) -> None:
    packed = blocks(shapes)
    chosen = layout(packed)
    query, key, value = qkv(chosen.frame.num_tokens)
    with rows(bounds_of(chosen, "portable")):
        out, weights = packed_attention(nn.Identity(), query, key, value, None, scaling=0.3)
    assert weights is None and out.shape == (1, chosen.frame.num_tokens, HEADS, SIZE)
    for start, length in zip(chosen.frame.starts.tolist(), chosen.lengths.tolist(), strict=True):
        own = slice(start, start + length)
        alone = F.scaled_dot_product_attention(query[:, :, own], key[:, :, own], value[:, :, own], scale=0.3)
        torch.testing.assert_close(out[:, own], alone.transpose(1, 2))


def test_the_kernel_is_chosen_by_device_and_precision() -> None:
    assert choose_kernel(device=torch.device("cpu"), dtype=torch.bfloat16).value == "portable"
    decision = choose_kernel(device=torch.device("cuda"), dtype=torch.float32)
    assert decision.value == "portable" and "float32" in decision.reason


@pytest.mark.parametrize("head_width", [384, 26])  # TinyBERT's heads are 26 wide
def test_heads_that_the_variable_length_kernel_refuses_take_the_portable_one(head_width: int) -> None:
    decision = choose_kernel(device=torch.device("cuda"), dtype=torch.bfloat16, head_width=head_width)
    assert decision.value == "portable" and str(head_width) in decision.reason


def test_variable_length_bounds_need_no_mask() -> None:
    chosen = layout(blocks())
    bounds = bounds_of(chosen, "varlen")
    assert bounds.cumulative is not None and bounds.cumulative.dtype == torch.int32
    assert bounds.key_masks == ()


def test_transformers_knows_the_name() -> None:
    from transformers import AttentionInterface

    register()
    assert AttentionInterface().get_interface(PACKED, None) is packed_attention


@pytest.mark.parametrize(
    "given", [{"position_bias": torch.zeros(1)}, {"sliding_window": 4}, {"is_causal": True}]
)
def test_attention_that_would_be_wrong_is_refused(given: dict[str, object]) -> None:
    chosen = layout(blocks())
    with (
        rows(bounds_of(chosen, "portable")),
        pytest.raises(BadInput, match="plain bidirectional attention only"),
    ):
        packed_attention(nn.Identity(), *qkv(chosen.frame.num_tokens), None, **given)
