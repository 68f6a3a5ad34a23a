"""One call of a reward, and the board that pool and worker share."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping

import pytest
import torch

from flatout.engines.evolution.rewards.worker import Board, Failure, score_row


class Value:
    """A reward that gives a fixed value."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __call__(self, completion: str, answer: Mapping[str, str], /) -> float:
        return self.value  # type: ignore[return-value]


def raises(completion: str, answer: Mapping[str, str], /) -> float:
    raise KeyError(f"no\nsuch {completion}")


@pytest.mark.parametrize("value", [1, 0.5, True, torch.tensor(0.25), "2"])
def test_whatever_is_a_number_is_a_score(value: object) -> None:
    assert score_row(Value(value), ("", {}), index=0) == float(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, "good", math.nan, math.inf, torch.ones(2), [1.0]])
def test_whatever_is_not_finite_is_a_failure(value: object) -> None:
    failure = score_row(Value(value), ("", {}), index=3)
    assert isinstance(failure, Failure) and failure.index == 3 and failure.kind == "invalid"


def test_what_a_reward_raises_is_told_in_one_line_with_its_place() -> None:
    failure = score_row(raises, ("x", {}), index=7)
    assert isinstance(failure, Failure) and failure.kind == "raised"
    assert str(failure).startswith("row 7 raised: KeyError: ")
    assert "test_reward_worker.py:" in failure.message and "\n" not in failure.message


def test_an_interrupt_is_not_a_failure() -> None:
    def interrupted(completion: str, answer: Mapping[str, str], /) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_row(interrupted, ("", {}), index=0)


def test_a_board_tells_the_row_under_way_and_the_scores_before_it() -> None:
    board = Board(Board.cells(multiprocessing.get_context("spawn")))
    board.clear()
    assert board.row is None and board.call_rows == 1
    cleared_s = board.began_s
    board.begin(0)
    board.set_score(0, 0.5)
    board.begin(1)
    board.set_score(1, math.nan)
    board.begin(2)
    assert board.row == 2
    assert board.scores(2) == [0.5, None]
    assert board.began_s >= cleared_s
    board.begin(0, call_rows=9)
    assert board.call_rows == 9
    board.clear()
    assert board.row is None
