"""Rewards give what they say, travel to other processes, and refuse bad set-ups in one line."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.evolution.rewards.bleu import Bleu
from flatout.engines.evolution.rewards.rewards import (
    ExactMatch,
    FormatMatch,
    NamedReward,
    NumericAnswer,
    Reward,
    RewardOfRows,
    WeightedSum,
    is_cheap,
    reward_named,
)
from flatout.errors import BadInput


def test_exact_match() -> None:
    assert ExactMatch()(" Paris\n", {"answer": "Paris"}) == 1.0
    assert ExactMatch()("paris", {"answer": "Paris"}) == 0.0
    assert ExactMatch(ignore_case=True)("paris", {"answer": "Paris"}) == 1.0
    assert ExactMatch(field="city")("Rome", {"city": "Rome"}) == 1.0


def test_numeric_answer() -> None:
    reward = NumericAnswer()
    assert reward("so it is 1,200.0", {"answer": "#### 1200"}) == 1.0
    assert reward("so it is 1,201", {"answer": "1200"}) == 0.0
    assert reward("I do not know", {"answer": "1200"}) == 0.0
    assert NumericAnswer(take="first")("4. The next sum: 5", {"answer": "4"}) == 1.0


def test_numeric_tolerance_is_relative_above_one() -> None:
    reward = NumericAnswer(tolerance=0.01)
    assert reward("1009", {"answer": "1000"}) == 1.0
    assert reward("1011", {"answer": "1000"}) == 0.0
    assert reward("0.009", {"answer": "0"}) == 1.0


def test_an_expected_answer_without_a_number_is_refused() -> None:
    with pytest.raises(BadInput, match="'many' holds no number"):
        NumericAnswer()("4", {"answer": "many"})


def test_format_match() -> None:
    reward = FormatMatch(pattern=r"(?s)<answer>.+</answer>")
    assert reward("x <answer>\n4</answer>", {}) == 1.0
    assert reward("4", {}) == 0.0
    with pytest.raises(BadInput, match="no regular expression"):
        FormatMatch(pattern="(")


def test_weighted_sum() -> None:
    reward = WeightedSum(parts=((1.0, NumericAnswer()), (0.5, FormatMatch(pattern="####"))))
    answer = {"answer": "4"}
    assert [reward(text, answer) for text in ("#### 4", "4", "#### 5", "5")] == [1.5, 1.0, 0.5, 0.0]
    with pytest.raises(BadInput, match="at least one"):
        WeightedSum(parts=())
    with pytest.raises(BadInput, match="nan"):
        WeightedSum(parts=((float("nan"), ExactMatch()),))


def test_only_rewards_that_end_on_any_input_are_cheap() -> None:
    assert is_cheap(ExactMatch())
    assert is_cheap(NumericAnswer())
    assert not is_cheap(FormatMatch(pattern="(a+)+$"))
    assert is_cheap(WeightedSum(parts=((1.0, ExactMatch()), (2.0, NumericAnswer()))))
    assert not is_cheap(WeightedSum(parts=((1.0, ExactMatch()), (2.0, FormatMatch(pattern="a")))))


@given(st.text(max_size=200))
def test_cheap_rewards_score_any_text(completion: str) -> None:
    for reward in (ExactMatch(), NumericAnswer()):
        assert reward(completion, {"answer": "7"}) in (0.0, 1.0)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(
        "LIMIT = 3\ndef length(completion, answer):\n    return len(completion) / int(answer['most'])\n"
    )
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    (tmp_path / "needy_rewards.py").write_text("import absent_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return "my_rewards"


def test_a_function_is_named_by_module_and_name(module: str) -> None:
    reward = reward_named(f"{module}:length")
    assert reward == NamedReward(f"{module}:length")
    assert reward("abc", {"most": "6"}) == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", r"no module 'no_such_module' .*PYTHONPATH"),
        ("my_rewards.inner:f", r"no module 'my_rewards\.inner'"),
        ("needy_rewards:f", "ModuleNotFoundError: No module named 'absent_package'"),
        ("my_rewards:absent", "has no function 'absent'"),
        ("my_rewards:LIMIT", "has no function 'LIMIT'"),
        ("broken_rewards:f", "ZeroDivisionError"),
        ("my_rewards:", "names no reward"),
        ("exakt", "known: exact, numeric, bleu"),
    ],
)
def test_names_that_stand_for_nothing(module: str, name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        reward_named(name)
    assert "\n" not in str(caught.value)


def test_known_names() -> None:
    assert reward_named("exact") == ExactMatch()
    assert reward_named("numeric") == NumericAnswer()
    assert reward_named("format:a|b") == FormatMatch(pattern="a|b")
    assert reward_named("format:a:b") == FormatMatch(pattern="a:b")
    assert reward_named("bleu") == Bleu()


def test_rewards_travel_by_value(module: str) -> None:
    rewards: list[Reward] = [
        ExactMatch(field="x"),
        NumericAnswer(tolerance=0.5),
        FormatMatch(pattern="a"),
        WeightedSum(parts=((2.0, ExactMatch()),)),
        NamedReward(f"{module}:length"),
        Bleu(lowercase=True),
    ]
    for reward in rewards:
        assert pickle.loads(pickle.dumps(reward)) == reward  # noqa: S301  as a pipe does it
    assert [isinstance(reward, RewardOfRows) for reward in rewards] == [False] * 5 + [True]
