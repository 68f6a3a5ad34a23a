from __future__ import annotations

import pytest

from flatout.engines.steering.trials.trial_engine import AnswerPair
from flatout.ground.errors import BadInput


def test_answers_are_compared_whole_without_their_ending_or_by_one_token() -> None:
    one = AnswerPair(prompt=(3,), positive=(5, 8, 2, 6), negative=(5, 9, 6))
    assert one.compared("whole") == ((5,), (8, 2, 6), (9, 6))
    assert one.compared("decisive") == ((5,), (8, 2), (9,))
    assert one.compared("first-token") == ((5,), (8,), (9,))
    begins = AnswerPair(prompt=(3,), positive=(5, 5), negative=(5,))
    assert begins.compared("whole") == begins.compared("decisive") == ((5,), (5,), ())


def test_answers_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(BadInput, match="the same tokens"):
        AnswerPair(prompt=(3,), positive=(5,), negative=(5,))
    with pytest.raises(BadInput, match="empty"):
        AnswerPair(prompt=(), positive=(5,), negative=(6,))
