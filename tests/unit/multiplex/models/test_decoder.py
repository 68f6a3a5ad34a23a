from __future__ import annotations

import dataclasses

import pytest
import torch

from flatout.ground.errors import BadInput
from flatout.multiplex.decode.forward import normalise
from flatout.multiplex.models.decoder import Norm
from flatout.multiplex.models.families import read_decoder
from tests.support.multiplex import VOCABULARY, shared_model, tiny_model


def test_a_decoder_knows_its_sizes() -> None:
    decoder = read_decoder(shared_model("llama"))
    assert (decoder.width, decoder.vocabulary, len(decoder.blocks)) == (48, VOCABULARY, 2)
    assert (decoder.dtype, decoder.device) == (torch.float32, torch.device("cpu"))
    assert read_decoder(tiny_model().to(torch.bfloat16)).dtype == torch.bfloat16


def test_products_come_in_order_of_use_and_without_the_head() -> None:
    decoder = read_decoder(shared_model("llama"))
    products = decoder.projections()
    wanted = []
    for block in decoder.blocks:
        wanted += [block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down]
    assert list(products.values()) == wanted
    assert [one.name for one in wanted] == list(products)
    assert len(products) == 8
    assert decoder.head.name not in products


def test_a_table_of_another_type_than_the_model_is_refused() -> None:
    decoder = read_decoder(tiny_model().to(torch.bfloat16))
    first, *rest = decoder.blocks
    assert first.attention.cos is not None
    wide = dataclasses.replace(first.attention, cos=first.attention.cos.float())
    blocks = (dataclasses.replace(first, attention=wide), *rest)
    with pytest.raises(BadInput, match=r"rotated in torch.float32, the model is torch.bfloat16"):
        dataclasses.replace(decoder, blocks=blocks)


def test_a_norm_may_store_its_weight_with_an_offset() -> None:
    """Added in float32: 1 + weight would lose most of a small weight in bfloat16."""
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight = torch.full((16,), 1e-3, dtype=torch.bfloat16)
    offset = Norm(weight=weight, bias=None, eps=1e-6, centred=False, offset=1.0)
    whole = Norm(weight=weight.float() + 1, bias=None, eps=1e-6, centred=False)
    assert torch.equal(normalise(offset, x), normalise(whole, x))
    assert weight.add(1).eq(1).all()
