"""Stepwise workspaces: the sizes that were measured, and where they begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.memory.cuda.formulas import (
    FORMULAS,
    SORTED_FROM,
    Formula,
    block_sums,
    partial_sums,
    pieces_of_a_table,
    sorted_indices,
    sums_of_blocks,
)

H200_MULTIPROCESSORS = 132


def test_partial_sums_are_as_measured() -> None:
    assert partial_sums(3072, 32768, H200_MULTIPROCESSORS) == 138_412_032


def test_few_inputs_need_no_partial_sums() -> None:
    assert partial_sums(3072, 8, H200_MULTIPROCESSORS) == 0
    assert partial_sums(1, 1, H200_MULTIPROCESSORS) == 0


@given(st.integers(1, 70_000), st.integers(1, 200_000), st.integers(1, 200))
def test_partial_sums_are_whole_rows_of_floats(
    num_outputs: int, num_inputs: int, num_multiprocessors: int
) -> None:
    num_bytes = partial_sums(num_outputs, num_inputs, num_multiprocessors)
    assert num_bytes >= 0
    assert num_bytes % (4 * num_outputs) == 0
    assert num_bytes != 4 * num_outputs  # one block alone leaves its sum at once


def test_a_sum_between_other_dimensions_is_divided_by_the_rows_inside_it() -> None:
    """As recorded of slot attention: 64 times 4096 rows of 7."""
    assert partial_sums(64 * 7, 4096, 132, 7) == 917_504


def test_pieces_of_a_table_are_as_measured() -> None:
    assert pieces_of_a_table(32768, 30522, 768) == 103_827_456


def test_pieces_of_a_narrow_table_are_not_padded() -> None:
    assert pieces_of_a_table(319_488, 780_000, 16) == (31_948 + 319_488) * 16 * 4


@pytest.mark.parametrize("count", [1, SORTED_FROM])
def test_few_indices_are_added_without_sorting(count: int) -> None:
    assert sorted_indices(count) == 0
    assert pieces_of_a_table(count, 30522, 768) == 0


@given(st.integers(SORTED_FROM + 1, 1 << 20), st.integers(1, 1 << 17), st.integers(1, 4096))
def test_a_table_of_one_row_is_summed_in_pieces_of_ten_rows(count: int, num_rows: int, width: int) -> None:
    assert sorted_indices(count) == 8 * count
    assert pieces_of_a_table(count, num_rows, width) >= pieces_of_a_table(count, 1, width)
    assert pieces_of_a_table(count, num_rows, width) >= 4 * width * (count // 10)


def test_a_formula_is_evaluated_from_its_counts() -> None:
    formula = Formula("partial sums", (3072, 32768, H200_MULTIPROCESSORS))
    assert formula.num_bytes == 138_412_032
    assert formula._replace(counts=(3072, 8, H200_MULTIPROCESSORS)).num_bytes == 0
    assert FORMULAS["partial sums"] is partial_sums


@given(st.integers(1, 1 << 21), st.integers(1, 4096), st.integers(1, 200))
def test_blocks_of_rows_are_few_and_only_of_many_narrow_rows(
    num_rows: int, width: int, num_multiprocessors: int
) -> None:
    num_bytes = block_sums(num_rows, width, 4, num_multiprocessors)
    assert num_bytes % (4 * width) == 0
    assert num_bytes <= 4 * width * -(-num_rows // 32)
    if num_rows <= 65_536 or width >= 32 * num_multiprocessors:
        assert num_bytes == sums_of_blocks(num_rows, width, num_multiprocessors) == 0
