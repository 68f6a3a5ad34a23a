from __future__ import annotations

import pytest

from flatout.engines.steering.trials.trial_engine import AnswerPair
from flatout.ground.errors import BadInput


def test_one_decisive_token_takes_one_branch() -> None:
    one = AnswerPair(prompt=(3,), positive=(5, 8, 6), negative=(5, 9, 6))
    assert one.decisive() == ((5,), (8,), (9,))
    assert AnswerPair(prompt=(3,), positive=(5, 5), negative=(5,)).decisive() == ((5,), (5,), ())
    with pytest.raises(BadInput, match="the same tokens"):
        AnswerPair(prompt=(3,), positive=(5,), negative=(5,))
    with pytest.raises(BadInput, match="empty"):
        AnswerPair(prompt=(), positive=(5,), negative=(6,))
