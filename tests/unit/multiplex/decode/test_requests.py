from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.multiplex.decode.requests import Limits, Request, first_stop

LIMITS = Limits(max_tokens=10, vocabulary=50, num_variants=3)


def test_a_request_may_ask_for_fewer_tokens_than_the_rest() -> None:
    assert LIMITS.check(Request(prompt=(1, 2)), 0, max_new_tokens=8) == 8
    assert LIMITS.check(Request(prompt=(1, 2), max_new_tokens=3), 0, max_new_tokens=8) == 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompt": ()}, "empty prompt"),
        ({"prompt": (1,) * 9}, r"needs 9 \+ 4 tokens; a slot holds 10 .*max_tokens=13"),
        ({"prompt": (1, 50)}, "has the token 50; the vocabulary has 50"),
        ({"prompt": (1, -1)}, "has the token -1"),
        ({"variant": 3}, "asks for variant 3 of 3"),
        ({"variant": -1}, "asks for variant -1"),
        ({"sign": 0}, "has sign 0"),
        ({"shared": 2}, "shares 2 of 2 prompt tokens"),
        ({"shared": -1}, "shares -1"),
        ({"max_new_tokens": 0}, "asks for 0 new tokens"),
        ({"key": -1}, "has the key -1"),
    ],
)
def test_what_cannot_run_is_named(changes: dict[str, Any], complaint: str) -> None:
    request = Request(**{"prompt": (1, 2), **changes})
    with pytest.raises(BadInput, match=f"request 7 .*{complaint}"):
        LIMITS.check(request, 7, max_new_tokens=4)


def naive_stop(tokens: list[int], stops: list[tuple[int, ...]], since: int) -> int | None:
    ends = [
        start + len(stop)
        for stop in stops
        for start in range(len(tokens) - len(stop) + 1)
        if tuple(tokens[start : start + len(stop)]) == stop and start + len(stop) > since
    ]
    return min(ends, default=None)


small = st.integers(0, 2)


@given(
    st.lists(small, max_size=12),
    st.lists(st.lists(small, min_size=1, max_size=3).map(tuple), max_size=3),
    st.integers(0, 12),
)
def test_the_earliest_stop_is_found(tokens: list[int], stops: list[tuple[int, ...]], since: int) -> None:
    assert first_stop(tokens, stops, since=since) == naive_stop(tokens, stops, since)
