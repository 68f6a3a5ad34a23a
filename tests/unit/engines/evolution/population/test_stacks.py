"""Matrices of one shape lie together, in stacks that are never too large."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.evolution.population import stacks
from flatout.engines.evolution.population.stacks import Stack, stacks_of


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
        assert len(names) == 1 or numbers <= stacks.CPU_NUMBERS


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
