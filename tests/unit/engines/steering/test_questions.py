"""Reading, refusing with a line number, and splitting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.steering.questions import (
    NEUTRAL,
    Question,
    question_of,
    read_neutral,
    read_questions,
    split_questions,
    write_prompts,
)
from flatout.ground.errors import BadInput

AB = {
    "question": "Tea?\n (A) Yes\n (B) No",
    "answer_matching_behavior": "(A)",
    "answer_not_matching_behavior": "(B)",
}
PAIR = {"prompt": "Tea?", "positive": "Yes", "negative": "No"}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))
    return path


def numbered(count: int) -> list[Question]:
    return [question_of(f"question {number}", positive="a", negative="b") for number in range(count)]


def test_both_forms_are_read_and_blank_lines_skipped(tmp_path: Path) -> None:
    path = written(tmp_path / "q.jsonl", AB, "", PAIR, {"positive": "I love it", "negative": "I hate it"})
    first, second, third = read_questions(path)
    assert (first.prompt, first.positive, first.negative) == tuple(AB.values())
    assert (second.prompt, second.positive, second.negative) == ("Tea?", "Yes", "No")
    assert third.prompt == ""
    assert len({first.key, second.key, third.key}) == 3


def test_a_json_list_is_the_same_file(tmp_path: Path) -> None:
    listed = tmp_path / "q.json"
    listed.write_text(json.dumps([AB, PAIR], indent=4))
    assert read_questions(listed) == read_questions(written(tmp_path / "q.jsonl", AB, PAIR))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "q.jsonl:3 is not JSON"),
        ("[1]", "q.jsonl:3 is a list, not an object"),
        ({"prompt": "x", "positive": "y"}, "q.jsonl:3: 'negative' is missing"),
        ({"question": "x"}, "q.jsonl:3: 'answer_matching_behavior' is missing"),
        ({**PAIR, "positive": 3}, "q.jsonl:3: 'positive' is a int"),
        ({**PAIR, "negative": ""}, "q.jsonl:3: 'negative' is empty"),
        ({**PAIR, "positive": "No"}, "q.jsonl:3: both answers are 'No'"),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, line: Any, said: str) -> None:
    path = written(tmp_path / "q.jsonl", PAIR, "", line)
    with pytest.raises(BadInput, match=said):
        read_questions(path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        read_questions(tmp_path / "absent.jsonl")
    with pytest.raises(BadInput, match="is empty"):
        read_questions(written(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{}\n{"prompt": "\xe9"}')
    with pytest.raises(BadInput, match="line 2, byte 15 is not UTF-8"):
        read_questions(tmp_path / "latin.jsonl")
    (tmp_path / "list.json").write_text('[\n{"prompt": }]')
    with pytest.raises(BadInput, match=r"list\.json:2 is not JSON"):
        read_questions(tmp_path / "list.json")


@given(count=st.integers(3, 60), seed=st.integers(0, 5), data=st.data())
def test_a_split_is_disjoint_complete_and_free_of_order(count: int, seed: int, data: Any) -> None:
    questions = numbered(count)
    mixed = data.draw(st.permutations(questions))
    parts = split_questions(questions, seed=seed)
    assert sorted(one.key for part in parts for one in part) == sorted(one.key for one in questions)
    assert all(parts)
    assert abs(len(parts[0]) - count / 2) <= 1.5
    again = split_questions(mixed, seed=seed)
    assert [{one.key for one in part} for part in parts] == [{one.key for one in part} for part in again]


def test_equal_questions_stay_together_and_a_seed_changes_the_split() -> None:
    questions = numbered(20)
    parts = split_questions(questions * 2, seed=0)
    assert not {one.key for one in parts[0]} & {one.key for part in parts[1:] for one in part}
    assert sum(map(len, parts)) == 40
    assert split_questions(questions, seed=0) != split_questions(questions, seed=1)


def test_splits_that_cannot_be_are_refused() -> None:
    with pytest.raises(BadInput, match="2 distinct questions cannot be split into 3"):
        split_questions(numbered(2) * 5, seed=0)
    assert [len(part) for part in split_questions(numbered(2), seed=0, shares=(0.5, 0.5, 0.0))] == [1, 1, 0]
    with pytest.raises(BadInput, match="sum to 1"):
        split_questions(numbered(9), seed=0, shares=(0.5, 0.5, 0.5))


class Chat:
    """A tokenizer with a template, as far as a prompt needs it."""

    chat_template = "there"

    def apply_chat_template(self, batch: Any, **options: Any) -> list[str]:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        said = ["".join(f"<{one['role']}>{one['content']}" for one in messages) for messages in batch]
        return [text + "<assistant>" for text in said]


def test_pairs_go_through_the_chat_template_where_there_is_one() -> None:
    question = question_of("Tea?", positive="Yes", negative="No")
    (pair,) = write_prompts([question], tokenizer=Chat(), system="Be kind.")
    assert pair.prompt == "<system>Be kind.<user>Tea?<assistant>"
    assert (pair.positive, pair.negative, pair.key) == ("Yes", "No", question.key)
    (plain,) = write_prompts([question])
    assert (plain.prompt, plain.positive) == ("Tea?", " Yes")
    (bare,) = write_prompts([question_of("", positive="Yes", negative="No")])
    assert (bare.prompt, bare.positive) == ("", "Yes")


def test_our_neutral_texts_are_distinct_sentences() -> None:
    assert len(set(NEUTRAL)) == len(NEUTRAL) >= 10
    assert all(len(text.split()) > 8 and text.endswith(".") for text in read_neutral(None))


def test_a_file_of_neutral_texts_gives_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "neutral.txt"
    path.write_text("one\n\n  two \n")
    assert read_neutral(path) == ["one", "two"]


def test_a_file_without_neutral_texts_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_neutral(tmp_path / "absent.txt")
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(BadInput, match="holds no text"):
        read_neutral(tmp_path / "empty.txt")
