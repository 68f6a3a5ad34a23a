"""Byte budgets, what moves where, and that every tier gives the same block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.engines.steering.extract.tiers import Tier, Tiers
from flatout.ground.errors import BadInput

BLOCK_BYTES = 40


def block(number: int) -> Tensor:
    return torch.full((10,), float(number))


def tiers(*blocks: int) -> Tiers:
    """Tiers that hold so many blocks each."""
    return Tiers([Tier(device="cpu", budget_bytes=count * BLOCK_BYTES) for count in blocks])


def test_a_block_moves_up_when_used_and_the_oldest_moves_down() -> None:
    held = tiers(2, 1)
    for number in (1, 2, 3):
        held.fetch(number, lambda number=number: block(number))  # type: ignore[misc]
    assert [held.level_of(number) for number in (1, 2, 3)] == [1, 0, 0]
    held.fetch(2, lambda: pytest.fail("it is held"))
    held.fetch(1, lambda: pytest.fail("it is held"))
    assert [held.level_of(number) for number in (1, 2, 3)] == [0, 0, 1]
    held.fetch(4, lambda: block(4))
    assert [held.level_of(number) for number in (1, 2, 3, 4)] == [0, 1, None, 0]


@given(counts=st.lists(st.integers(0, 3), max_size=3), uses=st.lists(st.integers(0, 5), max_size=30))
def test_budgets_hold_and_values_never_change(counts: list[int], uses: list[int]) -> None:
    held = tiers(*counts)
    for number in uses:
        assert torch.equal(held.fetch(number, lambda number=number: block(number)), block(number))  # type: ignore[misc]
        assert all(used <= count * BLOCK_BYTES for used, count in zip(held.held_bytes(), counts, strict=True))


def test_a_block_larger_than_a_tier_goes_to_the_next() -> None:
    held = tiers(0, 1)
    held.fetch("a", lambda: block(1))
    assert held.level_of("a") == 1
    held.drop("a")
    assert held.level_of("a") is None


def test_a_held_block_is_a_copy_of_what_the_disk_gave() -> None:
    mapped = block(1)
    held = tiers(1).fetch("a", lambda: mapped)
    mapped.zero_()
    assert torch.equal(held, block(1))
    assert tiers().fetch("a", lambda: mapped) is mapped


def test_tiers_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="budget of tier cpu is -1"):
        Tier(device="cpu", budget_bytes=-1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="sees no GPU"):
        Tier(device="cuda:1", budget_bytes=1)


@pytest.mark.gpu
def test_the_host_tier_is_page_locked_where_there_is_a_gpu() -> None:
    held: Any = Tiers([Tier(device="cuda:0", budget_bytes=40), Tier(device="cpu", budget_bytes=40)])
    held.fetch("a", lambda: block(1))
    held.fetch("b", lambda: block(2))
    assert held.fetch("b", lambda: block(0)).device.type == "cuda"
    assert held._held[1]["a"].is_pinned()
    assert torch.equal(held.fetch("a", lambda: block(0)).cpu(), block(1))
