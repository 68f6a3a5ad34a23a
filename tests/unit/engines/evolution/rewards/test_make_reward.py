"""What users give as rewards: names, functions of both forms, and several with weights."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.evolution.rewards.bleu import Bleu
from flatout.engines.evolution.rewards.kinds import (
    ExactMatch,
    FormatMatch,
    NumericAnswer,
    Reward,
    RewardOfRows,
    is_cheap,
)
from flatout.engines.evolution.rewards.make_reward import (
    BatchReward,
    NamedReward,
    WeightedRewards,
    make_reward,
    name_of,
    reward_by_name,
)
from flatout.engines.evolution.rewards.pool import RewardPool
from flatout.engines.evolution.rewards.worker import Failure, _scored_together
from flatout.ground.errors import BadInput


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_rewards.py").write_text(
        "LIMIT = 3\ndef length(completion, answer):\n    return len(completion) / int(answer['most'])\n"
    )
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    (tmp_path / "needy_rewards.py").write_text("import absent_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("my_rewards", None)  # another test has one of this name
    yield "my_rewards"
    sys.modules.pop("my_rewards", None)


def test_a_function_is_named_by_module_and_name(module: str) -> None:
    reward = reward_by_name(f"{module}:length")
    assert reward == NamedReward(f"{module}:length")
    assert reward("abc", {"most": "6"}) == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", r"no module 'no_such_module' .*PYTHONPATH"),
        ("my_rewards.inner:f", r"no module 'my_rewards\.inner'"),
        ("needy_rewards:f", "ModuleNotFoundError: No module named 'absent_package'"),
        ("my_rewards:absent", "my_rewards has no 'absent'"),
        ("my_rewards:LIMIT", "'my_rewards:LIMIT' is not a function"),
        ("broken_rewards:f", "ZeroDivisionError"),
        ("my_rewards:", "does not name a reward"),
        ("exakt", "known: exact, numeric, bleu"),
    ],
)
def test_names_that_stand_for_nothing(module: str, name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        reward_by_name(name)
    assert "\n" not in str(caught.value)


def test_known_names() -> None:
    assert reward_by_name("exact") == ExactMatch()
    assert reward_by_name("numeric") == NumericAnswer()
    assert reward_by_name("format:a|b") == FormatMatch(pattern="a|b")
    assert reward_by_name("format:a:b") == FormatMatch(pattern="a:b")
    assert reward_by_name("bleu") == Bleu()


def test_rewards_travel_by_value(module: str) -> None:
    rewards: list[Reward] = [
        ExactMatch(field="x"),
        NumericAnswer(tolerance=0.5),
        FormatMatch(pattern="a"),
        NamedReward(f"{module}:length"),
        Bleu(lowercase=True),
    ]
    for reward in rewards:
        assert pickle.loads(pickle.dumps(reward)) == reward  # noqa: S301  as a pipe does it
    assert [isinstance(reward, RewardOfRows) for reward in rewards] == [False] * 4 + [True]


def near(prompts: list[str], completions: list[str], target: list[int], **columns: Any) -> list[float | None]:
    """As TRL calls it: lists by keyword, every column of the data among them."""
    assert len(prompts) == len(completions) == len(target) == len(columns["level"])
    return [
        None if not text else -abs(int(text) - wanted)
        for text, wanted in zip(completions, target, strict=True)
    ]


def brief(completions: list[str]) -> list[float]:
    return [1 / (1 + len(text)) for text in completions]


def one_short(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


def by_row(completion: str, answer: Mapping[str, Any]) -> float:
    return float(completion == str(answer["target"]) and answer["prompt"] == "2+2=")


FACTS = {"prompt": "2+2=", "target": 4, "level": [1]}


def test_a_function_of_many_rows_is_called_as_trl_does() -> None:
    reward = make_reward(near)
    assert isinstance(reward, BatchReward) and isinstance(reward, RewardOfRows)
    assert reward.score_rows([("7", FACTS), ("", FACTS), ("4", FACTS)]) == [-3, None, 0]
    assert make_reward(brief)("ab", FACTS) == pytest.approx(1 / 3)  # it names no column and gets none
    assert make_reward(by_row) is by_row and by_row("4", FACTS) == 1.0
    with pytest.raises(BadInput, match=r"takes 'target', and a row has no such column .*completions, level"):
        make_reward(near).check_answer({"prompt": "x", "level": 1})  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="one_short returned 1 rewards for 2 completions"):
        make_reward(one_short).score_rows([("a", {}), ("b", {})])  # type: ignore[attr-defined]


def test_several_rewards_are_summed_by_their_weights() -> None:
    both = make_reward({"exact": 2.0, "numeric": 0.5})
    assert is_cheap(both)
    assert both("4", {"answer": "4"}) == 2.5 and both("4.0", {"answer": "4"}) == 0.5
    mixed = WeightedRewards(((make_reward(near), 1.0), (make_reward(brief), 3.0)))
    assert mixed.score_rows([("4", FACTS), ("", FACTS)]) == [1.5, 3.0]  # the first is not for an empty text
    assert WeightedRewards(((make_reward(near), 1.0),)).score_rows([("", FACTS)]) == [None]
    assert not is_cheap(mixed) and not is_cheap(make_reward([near, "exact"]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no reward is given"),
        ({"exact": "much"}, "weight of 'exact' is 'much', not a finite number"),
        ({"exact": float("nan")}, "weight of 'exact' is nan, not a finite number"),
        (3, "3 is not a reward"),
        (lambda one: 1.0, "takes .one.*def reward"),
    ],
)
def test_what_is_no_reward_is_said(given: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make_reward(given)


def test_a_row_that_is_for_no_reward_has_none_and_one_that_is_not_finite_fails_alone() -> None:
    assert _scored_together(make_reward(near), [("7", FACTS), ("", FACTS)]) == [-3, None]
    found = _scored_together(make_reward(not_finite), [("7", FACTS), ("", FACTS)])
    assert found is not None and found[0] == 7
    assert isinstance(found[1], Failure) and "not finite" in found[1].message


def not_finite(completions: list[str], **_: Any) -> list[float]:
    return [float(text or "nan") for text in completions]


def returns_a_text(completions: list[str], **_: Any) -> str:
    return "good"


def returns_one_number(completions: list[str], **_: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (one_short, "returned 1 rewards for 2 completions"),
        (returns_a_text, "returned 'good', not a list of rewards"),
        (returns_one_number, "returned '1.0', not a list of rewards"),
    ],
)
def test_many_rows_without_a_reward_for_each_all_fail_and_name_the_function(
    function: Any, message: str
) -> None:
    found = _scored_together(make_reward(function), [("7", {}), ("8", {})])
    assert found is not None and len(found) == 2
    place = f"{__file__}:{function.__code__.co_firstlineno}"
    for row in found:
        assert isinstance(row, Failure) and row.kind == "invalid"
        assert message in row.message and place in row.message


def test_what_a_function_of_the_users_raises_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "odd_batches.py").write_text(
        "def odd(prompts, completions, **columns):\n    return [1 / int(c) for c in completions]\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with RewardPool(make_reward("odd_batches:odd"), workers=1, timeout_s=20) as pool:
            scores = pool.score([("2", FACTS), ("0", FACTS), ("4", FACTS)])
    finally:
        sys.path.remove(str(tmp_path))
    assert scores.values == (0.5, None, 0.25)
    assert "ZeroDivisionError" in str(scores.failures[0]) and "odd_batches.py:2" in str(scores.failures[0])
    assert name_of(make_reward(near).function) == f"{__name__}:near"  # type: ignore[attr-defined]
