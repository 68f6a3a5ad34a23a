"""One call of a reward, and what a worker says to its pool."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Mapping

import pytest
import torch

from flatout.engines.evolution.rewards.worker import Failure, score_row, serve


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


def test_none_says_that_the_reward_is_not_for_the_row() -> None:
    assert score_row(Value(None), ("", {}), index=0) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["good", math.nan, math.inf, torch.ones(2), [1.0]])
def test_whatever_is_not_finite_is_a_failure(value: object) -> None:
    failure = score_row(Value(value), ("", {}), index=3)
    assert isinstance(failure, Failure) and failure.index == 3 and failure.kind == "invalid"


def test_what_a_reward_raises_is_told_in_one_line_with_its_place() -> None:
    failure = score_row(raises, ("x", {}), index=7)
    assert isinstance(failure, Failure) and failure.kind == "raised"
    assert str(failure).startswith("row 7 raised: KeyError: ")
    assert "test_worker.py:" in failure.message and "\n" not in failure.message


def reads_json(completion: str, answer: Mapping[str, str], /) -> float:
    return float(json.loads(completion))


def test_the_place_is_the_rewards_own_line_where_a_library_raised() -> None:
    failure = score_row(reads_json, ("{", {}), index=0)
    assert isinstance(failure, Failure) and "JSONDecodeError" in failure.message
    line = reads_json.__code__.co_firstlineno + 1
    assert failure.message.endswith(f"({__file__}:{line})")


def exits(completion: str, answer: Mapping[str, str], /) -> float:
    raise SystemExit("enough")


def test_a_reward_that_exits_costs_its_row() -> None:
    failure = score_row(exits, ("", {}), index=0)
    assert isinstance(failure, Failure) and failure.message.startswith("SystemExit: enough (")


def test_an_interrupt_is_not_a_failure() -> None:
    def interrupted(completion: str, answer: Mapping[str, str], /) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_row(interrupted, ("", {}), index=0)


def length(completion: str, answer: Mapping[str, str], /) -> float:
    return 1.0 / len(completion)


def test_scores_go_back_together_and_a_failure_in_its_place() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    under_way = context.RawArray("d", 2)
    process = context.Process(target=serve, args=(there, under_way))
    process.start()
    there.close()
    here.send(length)
    assert here.recv() == ("ready", None)
    here.send(([("ab", {}), ("", {}), ("a", {})], True))  # together, which this reward cannot
    assert here.recv() == ("apart", None)
    kind, scores = here.recv()
    assert kind == "scores" and scores[::2] == [0.5, 1.0] and scores[1].kind == "raised"
    assert under_way[1] == 2 and under_way[0] > 0
    here.close()
    process.join()
    assert process.exitcode == 0
