"""Evaluations on disk: read back equal, refused when foreign, and read as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.adapters.evaluation.results import (
    FILE,
    KIND,
    Evaluation,
    RoutingScores,
    with_heads_only,
)
from flatout.ground.documents import read_document, write_document
from flatout.ground.errors import BadInput
from tests.support.adapters import OWN, TASKS, evaluation, hostile_report, scores


@pytest.mark.parametrize("found", [evaluation(), evaluation(routing=None, heads_only=None, shown=())])
def test_an_evaluation_is_read_as_it_was_written(found: Evaluation, tmp_path: Path) -> None:
    path = tmp_path / "run" / FILE
    write_document(path, found, KIND)
    assert read_document(path, Evaluation, KIND) == found
    assert [each.name for each in path.parent.iterdir()] == [FILE]


def test_hostile_texts_survive(tmp_path: Path) -> None:
    found = hostile_report().evaluation
    assert found is not None
    write_document(tmp_path / FILE, found, KIND)
    assert read_document(tmp_path / FILE, Evaluation, KIND) == found


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "other"}, "is not an evaluation"),
        ({"version": 9}, "has version 9"),
        ({"tasks": "qa"}, r"damaged: Evaluation\.tasks is str"),
    ],
)
def test_foreign_files_are_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / FILE
    write_document(path, evaluation(), KIND)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadInput, match=complaint):
        read_document(path, Evaluation, KIND)


def test_missing_and_torn_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="flatout adapt evaluate"):
        read_document(tmp_path / FILE, Evaluation, KIND)
    (tmp_path / FILE).write_text('{"format": ')
    with pytest.raises(BadInput, match="cannot be read"):
        read_document(tmp_path / FILE, Evaluation, KIND)


def test_scores_are_found_by_routing_and_adapter() -> None:
    found = evaluation()
    assert found.score("qa", "oracle") == OWN["qa"]
    assert found.score("qa", "single", adapter="code") == OWN["qa"] - 17.0
    assert found.score("code", "single", adapter="code") == OWN["code"]
    assert found.best_single == "sentiment"  # the fewest points lost elsewhere
    assert found.score("qa", "single") == found.score("qa", "single", adapter="sentiment")
    assert found.mean("oracle") == pytest.approx(sum(OWN.values()) / 5)
    assert found.adapters == TASKS
    bare = evaluation(scores=(scores("oracle", 0),))
    assert bare.score("qa", "routed") is None and bare.mean("routed") is None and bare.best_single is None


def test_a_run_without_adapters_is_set_beside() -> None:
    other = evaluation(scores=(RoutingScores(routing="oracle", by_task={"qa": {"f1": 50.0}}),))
    both = with_heads_only(evaluation(heads_only=None), other)
    assert both.heads_only_score("qa") == 50.0 and both.heads_only_score("code") is None
    assert both.notes == ()
    fewer = evaluation(num_rows={**dict.fromkeys(TASKS, 500), "qa": 40})
    assert "qa (40 rows, not 500)" in with_heads_only(evaluation(), fewer).notes[0]


def test_a_run_of_other_tasks_is_refused() -> None:
    other = Evaluation(tasks=("naming",), metrics={"naming": "f1"}, num_rows={"naming": 1}, scores=())
    with pytest.raises(BadInput, match="scored naming, this one sentiment"):
        with_heads_only(evaluation(), other)
