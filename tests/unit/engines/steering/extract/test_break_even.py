"""Storing pays exactly when it takes less time."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flatout.engines.steering.extract.break_even import storing_pays
from flatout.errors import BadInput

RATES = st.floats(1e3, 1e9)


@given(
    num_bytes=st.integers(1, 10**9),
    recompute_s=st.floats(1e-6, 1e4),
    uses=st.integers(0, 20),
    write=RATES,
    read=RATES,
)
def test_the_rule_is_the_shorter_time(
    num_bytes: int, recompute_s: float, uses: int, write: float, read: float
) -> None:
    storing = num_bytes / write + uses * num_bytes / read
    recomputing = uses * recompute_s
    assume(abs(storing - recomputing) > 1e-6 * recomputing)
    decision = storing_pays(
        num_bytes=num_bytes,
        recompute_s=recompute_s,
        uses=uses,
        write_bytes_per_s=write,
        read_bytes_per_s=read,
    )
    assert decision.value == (storing < recomputing)
    assert decision.source == "measured"


def test_the_reason_names_both_costs() -> None:
    decision = storing_pays(num_bytes=500_000_000, recompute_s=12.0, uses=1)
    assert decision.value
    assert decision.source == "assumed"
    assert "477 MiB take 1.00 s to write and 1.00 s to read, computing them takes 12.0 s" in decision.reason
    assert "from use 1 on, and 1 are expected" in decision.reason
    never = storing_pays(num_bytes=500_000_000, recompute_s=0.5, uses=100)
    assert not never.value
    assert "never beats" in never.reason


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(BadInput, match="uses=-1"):
        storing_pays(num_bytes=1, recompute_s=1.0, uses=-1)
