"""Spans are spans of tokens: what the tokens say is what the answer says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.adapters.tasks.kinds.qa import QuestionAnswering, best_spans, token_span
from flatout.ground.errors import BadInput
from tests.support.adapters import tiny_tokenizer

words = st.text("abcdefgXYZ12", min_size=1, max_size=6)
contexts = st.lists(words, min_size=2, max_size=40)


def spoken(text: str) -> str:
    """A text as the tokenizer can say it."""
    tokenizer = tiny_tokenizer()
    return str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))


@st.composite
def questions(draw: Any) -> dict[str, Any]:
    """A context of random words, and some of them in a row as the answer."""
    found = draw(contexts)
    first = draw(st.integers(0, len(found) - 1))
    last = draw(st.integers(first, min(len(found) - 1, first + 4)))
    return {
        "context": " ".join(found),
        "question": " ".join(draw(st.lists(words, min_size=1, max_size=5))) + "?",
        "answer": " ".join(found[first : last + 1]),
        "start": len(" ".join(found[:first])) + bool(first),
    }


@given(questions())
def test_the_tokens_of_the_span_say_the_answer(record: dict[str, Any]) -> None:
    task, tokenizer = QuestionAnswering(), tiny_tokenizer()
    example = task.encode(task.record_of(record), tokenizer, max_length=500)
    assert example.trainable and example.types is not None and example.offsets is not None
    first, last = int(example.targets["start"]), int(example.targets["end"])
    assert tokenizer.decode(example.ids[first : last + 1].tolist()) == spoken(record["answer"])
    assert example.types[first : last + 1].all()
    span = slice(example.offsets[first, 0], example.offsets[last, 1])
    assert record["context"][span] == record["answer"]


@given(questions(), st.integers(12, 40))
def test_a_window_holds_the_whole_answer_or_gives_no_target(record: dict[str, Any], max_length: int) -> None:
    task, tokenizer = QuestionAnswering(), tiny_tokenizer()
    example = task.encode(record, tokenizer, max_length=max_length)
    assert len(example.ids) <= max_length and example.offsets is not None
    inside = example.offsets[example.offsets[:, 0] >= 0]
    assert len(inside)
    covered = inside[0, 0] <= record["start"] and inside[-1, 1] >= record["start"] + len(record["answer"])
    assert example.trainable == covered
    if covered:
        first, last = int(example.targets["start"]), int(example.targets["end"])
        assert tokenizer.decode(example.ids[first : last + 1].tolist()) == spoken(record["answer"])


def test_the_window_is_where_the_question_is_and_not_where_the_answer_is() -> None:
    context = "a b c d " * 30 + "the harbour of Lima opens at noon. " + "e f g h " * 30
    record = {"context": context, "question": "When does the harbour open?", "answer": "noon"}
    task = QuestionAnswering()
    asked = task.record_of(record)
    example = task.encode(asked, tiny_tokenizer(), max_length=90)
    assert example.trainable
    without = task.encode({**asked, "answer": "a", "start": 0}, tiny_tokenizer(), max_length=90)
    assert np.array_equal(without.ids, example.ids) and not without.trainable


def test_a_long_question_leaves_room_for_the_context() -> None:
    record = {"context": "one two three", "question": "why " * 200}
    example = QuestionAnswering().encode(record, tiny_tokenizer(), max_length=30)
    assert example.offsets is not None and len(example.ids) <= 30
    assert (example.offsets[:, 0] >= 0).sum() > 5


def test_a_length_without_room_for_a_context_is_refused() -> None:
    with pytest.raises(BadInput, match="max_length=4 leaves no room for a context"):
        QuestionAnswering().encode({"context": "one two", "question": "why?"}, tiny_tokenizer(), max_length=4)


def test_an_answer_inside_a_word_takes_the_tokens_that_overlap_it() -> None:
    offsets = np.array([[-1, -1], [0, 4], [4, 6], [6, 9], [-1, -1]], dtype=np.int32)
    assert token_span(offsets, start=4, stop=6) == (2, 2)
    assert token_span(offsets, start=5, stop=7) == (2, 3)
    assert token_span(offsets, start=0, stop=9) == (1, 3)
    assert token_span(offsets, start=7, stop=12) is None
    assert token_span(offsets, start=20, stop=22) is None


def test_a_place_that_is_wrong_is_refused_and_a_missing_one_is_searched() -> None:
    row = {"context": "Lima is far.", "question": "What?", "answer": "far"}
    task = QuestionAnswering()
    assert task.record_of(row)["start"] == 8
    for start in (7, -4, "8"):
        with pytest.raises(BadInput, match="the answer 'far' is not in the context at 'start'="):
            task.record_of({**row, "start": start})
    with pytest.raises(BadInput, match="at 'start'=-1"):
        task.record_of({**row, "answer": "near"})


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_the_best_span_is_that_of_a_plain_search(rows: int, length: int, longest: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    start, end = torch.randn(2, rows, length, generator=random)
    found = best_spans(start, end, longest=longest)
    for row in range(rows):
        spans = [(i, j) for i in range(length) for j in range(i, min(i + longest, length))]
        best = max(spans, key=lambda span: float(start[row, span[0]] + end[row, span[1]]))
        assert tuple(found[row].tolist()) == best


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(BadInput, match="use a fast one"):
        QuestionAnswering().encode({"context": "x", "question": "y"}, Slow(), max_length=9)


def test_predictions_are_cut_from_the_context_as_it_was_written() -> None:
    task, tokenizer = QuestionAnswering(), tiny_tokenizer()
    record = task.record_of({"context": "In Lima, Ada PAINTS.", "question": "Who?", "answer": "Ada PAINTS"})
    example = task.encode(record, tokenizer, max_length=100)
    batch = task.collate([example], adapter=0, pad_id=0)
    head = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(head.weight)
    states = torch.zeros(1, batch.block.length, 2)
    states[0, int(example.targets["start"]), 0] = 5
    states[0, int(example.targets["end"]), 1] = 5
    states[0, 0] = 50  # a token outside the context, however likely, is no answer
    (said,) = task.predict(head, states, batch, tokenizer=tokenizer, records=[record])
    assert said.text == "Ada PAINTS"
    assert task.score([said], [record]) == {"f1": 100, "exact_match": 100}
