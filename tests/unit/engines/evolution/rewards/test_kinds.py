"""Rewards give what they say, travel to other processes, and refuse bad set-ups in one line."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.evolution.rewards.kinds import (
    _NUMBER,
    ExactMatch,
    FormatMatch,
    NumericAnswer,
    _value,
    answer_in,
    check_answer,
    expected_text,
    is_cheap,
    number_in,
)
from flatout.ground.errors import BadInput


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
    with pytest.raises(BadInput, match="not a regular expression"):
        FormatMatch(pattern="(")


def test_only_rewards_that_end_on_any_input_are_cheap() -> None:
    assert is_cheap(ExactMatch())
    assert is_cheap(NumericAnswer())
    assert not is_cheap(FormatMatch(pattern="(a+)+$"))


@given(st.text(max_size=200))
def test_cheap_rewards_score_any_text(completion: str) -> None:
    for reward in (ExactMatch(), NumericAnswer()):
        assert reward(completion, {"answer": "7"}) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 42.", Fraction(42)),
        ("1,234,567.50 dollars", Fraction("1234567.5")),
        ("$18", Fraction(18)),
        ("it falls by -3", Fraction(-3)),
        ("it falls by \u22123", Fraction(-3)),
        ("16-3", Fraction(3)),
        ("(7)-3", Fraction(3)),
        ("16 - 3 = 13", Fraction(13)),
        ("x=-.5", Fraction(-1, 2)),
        ("3/4", Fraction(3, 4)),
        ("-3/4 of it", Fraction(-3, 4)),
        ("1,2", Fraction(2)),
        ("12,3456", Fraction(3456)),
        ("+7%", Fraction(7)),
        ("5 and then 1/0", Fraction(5)),
        ("nothing", None),
        ("", None),
        ("...", None),
    ],
)
def test_last_number(text: str, expected: Fraction | None) -> None:
    assert number_in(text) == expected


def test_first_number() -> None:
    assert number_in("3 apples and 4 pears", take="first") == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2+2=4\n#### 4\nQuestion 2: what is 9?", 4),
        ("#### $1,234", 1234),
        ("####-5", -5),
        ("#### 3 because 5", 3),
        ("first #### 1, no: #### 2", 2),
        ("12 is wrong\n####", None),
        ("#### none of 12\n13", 12),
        ("so \\boxed{7} of 9", 7),
        ("\\boxed{1} then \\boxed{2}", 2),
        ("17", 17),
    ],
)
def test_marked_answers_come_first(text: str, expected: int | None) -> None:
    assert answer_in(text) == expected


@given(st.integers(-(10**12), 10**12))
def test_any_grouping_of_a_whole_number_is_read(number: int) -> None:
    assert number_in(f"so {number}.") == number
    assert number_in(f"so {number:,}.") == number


@given(st.fractions())
def test_fractions_are_read_exactly(number: Fraction) -> None:
    assert number_in(f"{number.numerator}/{number.denominator}") == number


@given(st.text(alphabet="0123456789,.-+/ #x\\{}boxed\n", max_size=300))
def test_no_text_raises(text: str) -> None:
    answer_in(text)


@given(st.lists(st.sampled_from([*"0123456789,.-+/ )x", "\u2212", "12", "1,234"])).map("".join))
def test_nothing_is_missed_between_candidates(text: str) -> None:
    values = [value for match in _NUMBER.finditer(text) if (value := _value(match)) is not None]
    assert number_in(text) == (values[-1] if values else None)
    assert number_in(text, take="first") == (values[0] if values else None)


def test_a_long_run_of_digits_has_no_value() -> None:
    assert number_in("9" * 100_000) is None
    assert number_in("5 and 1/" + "9" * 100_000) == 5


def test_the_expected_text_is_the_named_the_usual_or_the_only_one() -> None:
    assert expected_text({"target": "two"}, None) == "two"
    assert expected_text({"answer": "2", "level": "easy"}, None) == "2"
    assert expected_text({"answer": "2", "level": "easy"}, "level") == "easy"
    for answer, field in (({"target": "two"}, "answer"), ({"numbers": "1", "target": "2"}, None), ({}, None)):
        with pytest.raises(BadInput, match="the answer has no 'answer' to compare with"):
            check_answer(ExactMatch(field=field), answer)
    check_answer(FormatMatch(pattern="x"), {})
