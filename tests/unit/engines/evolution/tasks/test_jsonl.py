"""Files are checked when a task is made, and a bad line is named by its number."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from flatout.engines.evolution.rewards.kinds import ExactMatch, Reward
from flatout.engines.evolution.tasks.jsonl import FileTask, read_splits
from flatout.engines.evolution.tasks.task import Prompt
from flatout.ground.errors import BadInput


def make(fields: dict[str, str]) -> Prompt:
    if fields["q"] == "bad":
        raise BadInput("q is bad", hint="give a good one")
    return Prompt(text=fields["q"], answer={"a": fields["a"]}, key=" ".join(fields["q"].split()))


def write(path: Path, questions: list[str]) -> Path:
    path.write_text("".join(json.dumps({"q": q, "a": "1"}) + "\n" for q in questions), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "f.jsonl:3 is not JSON"),
        ("[1]", "f.jsonl:3 is a list, not an object"),
        ('{"q": "x"}', "f.jsonl:3: 'a' is missing"),
        ('{"q": "x", "a": 5}', "f.jsonl:3: 'a' is 5, not a text"),
        ('{"q": " ", "a": "5"}', "f.jsonl:3: 'q' is ' ', not a text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(f'{{"q": "x", "a": "1"}}\n\n{line}\n')
    with pytest.raises(BadInput, match=message) as caught:
        read_splits(path, None, names=("q", "a"), make=make)
    assert '{"q": "...", "a": "..."}' in str(caught.value) and "\n" not in str(caught.value)


def test_one_file_is_divided(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", [f"question {n}" for n in range(200)] * 2)
    train, heldout = read_splits(path, None, names=("q", "a"), make=make)
    assert {p.key for p in train}.isdisjoint(p.key for p in heldout)
    assert len({p.key for p in train}) + len(heldout) == 200
    assert 10 < len(heldout) < 50


def test_what_is_in_both_files_is_not_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", ["a", "b", "c  d", "e"])
    second = write(tmp_path / "test.jsonl", ["c d", "x", "x"])
    train, heldout = read_splits(path, second, names=("q", "a"), make=make)
    assert [p.text for p in train] == ["a", "b", "e"]
    assert [p.text for p in heldout] == ["c d", "x"]
    with pytest.raises(BadInput, match="also in"):
        read_splits(path, path, names=("q", "a"), make=make)


def test_too_few_prompts_to_hold_some_out(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", ["the same"] * 9)
    with pytest.raises(BadInput, match=r"too few different prompts \(1\)"):
        read_splits(path, None, names=("q", "a"), make=make)


def test_what_a_task_refuses_is_named_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", ["fine", "bad"])
    with pytest.raises(BadInput, match=r"f\.jsonl:2: q is bad \(give a good one\)"):
        read_splits(path, None, names=("q", "a"), make=make)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked(FileTask):
    template: str = "{x}: {q}{q}"
    max_new_tokens: int = 4
    reward: Reward = field(default_factory=ExactMatch)
    name: ClassVar[str] = "asked"
    fields: ClassVar[tuple[str, ...]] = ("q", "a")

    def answer(self, fields: dict[str, str]) -> dict[str, str]:
        return {"a": fields["a"]}


def test_a_template_is_filled_and_must_ask(tmp_path: Path) -> None:
    path = write(tmp_path / "f.jsonl", [f"{{q}} {n}" for n in range(60)])
    first = Asked(path=path).prompts("train", epoch=0, count=1, seed=0)[0]
    asked = (first.text or "").removeprefix("{x}: ")
    assert asked.startswith("{q} ") and asked == asked[: len(asked) // 2] * 2
    assert first.answer == {"a": "1"} and first.key.startswith("asked ")
    with pytest.raises(BadInput, match=r"has no \{q\}"):
        Asked(path=path, template="ask {x}")
