from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.device.overlap import communication, covered_length

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=8)


def spans(pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.array([(start, start + length) for start, length in pairs], dtype=np.int64).reshape(-1, 2)


def ticks(pairs: list[tuple[int, int]]) -> set[int]:
    return {tick for start, length in pairs for tick in range(start, start + length)}


@given(exchange=SPANS, computing=SPANS)
def test_what_no_computation_hides_is_what_a_count_of_ticks_says(
    exchange: list[tuple[int, int]], computing: list[tuple[int, int]]
) -> None:
    assert covered_length(spans(exchange)) == len(ticks(exchange))
    found = communication(spans(exchange), spans(computing))
    if not exchange:
        assert found is None
    else:
        assert found == (len(ticks(exchange)), len(ticks(exchange) - ticks(computing)))
