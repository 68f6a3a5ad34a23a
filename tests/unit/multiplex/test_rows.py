from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.multiplex.rows import Groups, Rows, VariantRange, are_even
from tests.support.multiplex import ranges_of


@given(num=st.integers(1, 5), size=st.integers(1, 4), antithetic=st.booleans())
def test_grouped_rows_are_recognised(num: int, size: int, antithetic: bool) -> None:
    size = 2 * size if antithetic else size
    rows = Rows.grouped(num, size=size, antithetic=antithetic)
    assert len(rows) == num * size and rows.num_variants == num
    assert rows.groups == Groups(num=num, size=size, antithetic=antithetic)
    for variant in range(num):
        own = slice(variant * size, (variant + 1) * size)
        assert set(rows.variants[own]) == {variant}
        if antithetic:
            assert rows.signs is not None
            assert rows.signs[own] == (1,) * (size // 2) + (-1,) * (size // 2)


@pytest.mark.parametrize(
    "rows",
    [
        Rows(()),
        Rows.plain(3),
        Rows((0, 1, 0, 1)),
        Rows((1, 1, 0, 0)),
        Rows((0, 0, 1)),
        Rows((0, None, 1, 1)),
        Rows((1, 1)),
        Rows((0, 0, 1, 1), (1, -1, -1, 1)),
        Rows((0, 0, 1, 1), (-1, 1, -1, 1)),
    ],
)
def test_rows_in_any_other_order_are_no_groups(rows: Rows) -> None:
    assert rows.groups is None


def test_rows_of_sign_one_are_groups_without_pairs() -> None:
    assert Rows((0, 0, 1, 1), (1, 1, 1, 1)).groups == Groups(num=2, size=2, antithetic=False)


def test_tables_hold_a_valid_variant_for_every_row() -> None:
    tables = Rows((2, None, 0), (-1, -1, 1)).tables()
    assert tables.index.tolist() == [2, 0, 0] and tables.index.dtype == torch.int64
    assert tables.sign.tolist() == [-1, 0, 1] and tables.sign.dtype == torch.float32
    assert Rows((1, None)).tables().sign.tolist() == [1, 0]


def test_plain_rows_name_no_variant() -> None:
    rows = Rows.plain(2)
    assert rows.variants == (None, None) and rows.num_variants == 0
    assert rows.tables().sign.tolist() == [0, 0]


def test_a_table_is_rewritten_in_place() -> None:
    """A captured graph reads these buffers by address."""
    tables = Rows((0, 1, 2, 3)).tables()
    addresses = tables.index.data_ptr(), tables.sign.data_ptr()
    tables.write([3, 1], Rows((7, None), (-1, 1)))
    assert tables.index.tolist() == [0, 0, 2, 7]
    assert tables.sign.tolist() == [1, 0, 1, -1]
    assert (tables.index.data_ptr(), tables.sign.data_ptr()) == addresses
    tables.write(torch.tensor([0]), Rows((5,)))
    assert tables.index.tolist() == [5, 0, 2, 7]


def test_the_tables_of_some_rows_are_a_copy() -> None:
    tables = Rows((0, 1, 2), (1, -1, 1)).tables()
    some = tables.take(torch.tensor([2, 1]))
    assert some.index.tolist() == [2, 1] and some.sign.tolist() == [1, -1]
    tables.write([2], Rows((9,)))
    assert some.index.tolist() == [2, 1]


def test_a_sign_may_be_a_multiple_and_groups_stay_groups() -> None:
    rows = Rows((0, 0, 1, 1), (0.5, -0.5, 0.5, -0.5))
    assert rows.tables().sign.tolist() == [0.5, -0.5, 0.5, -0.5]
    assert rows.groups == Rows.grouped(2, size=2, antithetic=True).groups
    with pytest.raises(BadInput, match="row 0 has sign inf"):
        Rows((0,), (float("inf"),))


def test_entries_that_cannot_be_are_named() -> None:
    with pytest.raises(BadInput, match=r"row 1 has variant -1 \(an unperturbed row is None\)"):
        Rows((0, -1))
    with pytest.raises(BadInput, match="1 signs for 2 rows"):
        Rows((0, 1), (1,))
    with pytest.raises(BadInput, match="row 1 has sign 0"):
        Rows((0, 1), (1, 0))
    with pytest.raises(BadInput, match="3 rows cannot be halved"):
        Rows.grouped(2, size=3, antithetic=True)


def test_neighbouring_rows_of_one_variant_are_a_range() -> None:
    rows = Rows((0, 0, None, 2, 2, 0), (1, -1, 1, 1, 1, 1))
    assert rows.ranges == (
        VariantRange(variant=0, start=0, stop=2),
        VariantRange(variant=2, start=3, stop=5),
        VariantRange(variant=0, start=5, stop=6),
    )
    assert [len(one) for one in rows.ranges] == [2, 2, 1]
    assert Rows.plain(3).ranges == ()


def test_ranges_are_even_where_a_batched_product_can_take_them() -> None:
    assert are_even(ranges_of([3, 3, 3])) and are_even(ranges_of([3, 3, 3])[1:])
    assert not are_even(()) and not are_even(ranges_of([3, 4]))
    assert not are_even(ranges_of([3, 3, 3])[::2])
    assert are_even(Rows.grouped(3, size=4, antithetic=True).ranges)
