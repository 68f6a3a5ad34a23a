"""Summaries: both forms of a line, and several right answers."""

from __future__ import annotations

import pytest

from flatout.engines.adapters.tasks.kinds.summarisation import Summarisation
from flatout.engines.adapters.tasks.task import Prediction
from flatout.ground.errors import BadInput


def test_both_forms_of_a_line() -> None:
    task = Summarisation()
    assert task.record_of({"document": "Long. Text.", "summary": "Short."}) == {
        "document": "Long. Text.",
        "summary": "Short.",
        "references": ["Short."],
    }
    assert task.record_of({"source": ["One.", "Two."], "target": ["First.", "Other."], "title": "x"}) == {
        "document": "One. Two.",
        "summary": "First.",
        "references": ["First.", "Other."],
    }
    assert task.record_of({"source": ["One.", "Two."]}, answered=False) == {"document": "One. Two."}
    with pytest.raises(BadInput, match="'target' is 3, not a text"):
        task.record_of({"document": "x", "target": ["ok", 3]})


def test_the_nearest_of_several_summaries_counts() -> None:
    task = Summarisation()
    record = {"document": "x", "summary": "one two", "references": ["one two", "three four five"]}
    said = [Prediction(text="three four five", num_correct=1, num_targets=4)]
    assert task.score(said, [record]) == {
        "token_accuracy": 25,
        "rouge_1": 100,
        "rouge_2": 100,
        "rouge_l": 100,
    }


def test_a_generated_summary_is_the_first_sentence() -> None:
    for record in Summarisation().generated(5, seed=0):
        assert record["document"].startswith(record["summary"] + " ")
