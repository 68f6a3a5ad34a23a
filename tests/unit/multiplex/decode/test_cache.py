from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.multiplex.decode.cache import BUCKET, Cache, Prefixes, bucket_of
from flatout.multiplex.models.families import read_decoder
from tests.support.multiplex import shared_model


def filled() -> Cache:
    cache = Cache.empty(read_decoder(shared_model()), slots=3, max_tokens=100)
    cache.storage.normal_()
    return cache


@given(st.integers(1, 10_000))
def test_a_bucket_holds_its_positions(num_positions: int) -> None:
    bucket = bucket_of(num_positions)
    assert bucket % BUCKET == 0
    assert num_positions <= bucket < num_positions + BUCKET


def test_the_last_position_belongs_to_no_text() -> None:
    decoder = read_decoder(shared_model())
    for max_tokens in (BUCKET - 1, BUCKET, BUCKET + 1):
        assert Cache.empty(decoder, slots=1, max_tokens=max_tokens).num_positions > max_tokens


def test_layers_are_views() -> None:
    cache = filled()
    assert cache.keys(1).shape == (3, 2, 128, 12)
    cache.keys(1)[2].fill_(7)
    cache.values(0)[1].fill_(8)
    assert bool((cache.storage[1, 0, 2] == 7).all()) and bool((cache.storage[0, 1, 1] == 8).all())
    assert cache.keys(1).is_contiguous()


def test_clearing_spares_the_other_slots() -> None:
    cache = filled()
    before = cache.storage.clone()
    cache.keys(0)[0, 0, 0, 0] = torch.nan
    cache.clear([0, 2])
    assert not cache.storage[:, :, [0, 2]].any()
    assert torch.equal(cache.storage[:, :, 1], before[:, :, 1])
    cache.clear([0, 1, 2])
    assert not cache.storage.any()


def test_a_prefix_is_put_where_it_is_wanted() -> None:
    cache = filled()
    before = cache.storage.clone()
    prefix = cache.take(1, length=10)
    cache.put(torch.tensor([0, 2]), prefix)
    for slot in (0, 2):
        assert torch.equal(cache.storage[:, :, slot, :, :10], before[:, :, 1, :, :10])
        assert torch.equal(cache.storage[:, :, slot, :, 10:], before[:, :, slot, :, 10:])
    cache.storage.zero_()
    assert prefix.any()  # a copy


def test_the_least_recently_used_prefix_goes_first() -> None:
    held = Prefixes(max_tokens=7)
    first, second, third = (torch.full((1,), float(value)) for value in (1, 2, 3))
    held.keep((1, 2, 3), first)
    held.keep((4, 5, 6), second)
    assert held.find((1, 2, 3)) is first
    held.keep((7,), third)
    assert held.num_tokens == 7
    held.keep((8, 9), third)
    assert held.find((4, 5, 6)) is None
    assert held.find((1, 2, 3)) is first
    held.keep(tuple(range(8)), third)  # larger than the store: nothing is given up for it
    assert len(held) == 3
    held.forget()
    assert len(held) == 0
