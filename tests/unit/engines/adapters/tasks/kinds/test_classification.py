"""Classification: labels come from the rows, in an order that a run can keep."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.engines.adapters.tasks.data_rows import Splits
from flatout.engines.adapters.tasks.kinds.classification import Classification
from flatout.engines.adapters.tasks.known import task_named
from flatout.ground.errors import BadInput


def splits(*labels: Any, test: tuple[Any, ...] = ()) -> Splits:
    task = Classification()

    def rows(given: tuple[Any, ...]) -> list[Any]:
        return [task.record_of({"text": f"row {number}", "label": one}) for number, one in enumerate(given)]

    return Splits(train=rows(labels), validation=[], test=rows(test), origin="rows.jsonl")


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        (("refund", "billing", "refund"), ["billing", "refund"]),
        ((10, 9, "2"), ["2", "9", "10"]),
        ((" yes ", "no"), ["no", "yes"]),
        ((-1, 0, 1), ["-1", "0", "1"]),
    ],
)
def test_labels_are_those_of_the_rows_in_order(given: tuple[Any, ...], labels: list[str]) -> None:
    found = splits(*given)
    assert Classification().settings_from(found) == {"labels": labels}
    assert (
        Classification(labels=tuple(labels)).describe(found) == f"{len(labels)} labels: {', '.join(labels)}"
    )


def test_a_label_of_test_rows_alone_has_an_output_and_is_told() -> None:
    found = splits("a", "b", test=("c",))
    assert Classification().settings_from(found) == {"labels": ["a", "b", "c"]}
    assert "no training row has c" in str(Classification(labels=("a", "b", "c")).describe(found))


def test_rows_of_one_label_are_refused() -> None:
    with pytest.raises(BadInput, match=r"every row of rows\.jsonl has the label a .*two labels"):
        Classification().settings_from(splits("a", "a"))


@pytest.mark.parametrize("label", [None, 1.5, "", ["a"]])
def test_what_is_not_a_label_is_refused(label: Any) -> None:
    with pytest.raises(BadInput, match="'label' is"):
        Classification().record_of({"text": "x", "label": label})


def test_a_label_that_a_run_does_not_know_is_refused_with_those_it_knows() -> None:
    task = task_named("classification", labels=["a", "b"])
    with pytest.raises(BadInput, match=r"'label' is 'c' \(the labels are a, b\)"):
        task.record_of({"text": "x", "label": "c"})


@pytest.mark.parametrize("labels", ["ab", 3, ["a"], ["a", "a"]])
def test_labels_that_are_not_a_list_of_different_ones_are_refused(labels: Any) -> None:
    with pytest.raises(BadInput, match="labels="):
        task_named("classification", labels=labels)


def test_generated_rows_have_the_labels_that_are_asked_for() -> None:
    rows = Classification(labels=("x", "y")).generated(20, seed=0)
    assert {row["label"] for row in rows} == {"x", "y"}
    assert len({row["label"] for row in Classification().generated(50, seed=0)}) == 5


def test_every_class_has_its_points() -> None:
    task = Classification(labels=("a", "b", "c"))
    records = [{"text": "", "label": label} for label in "aab"]
    assert task.class_scores(["a", "b", "b"], records) == {
        "a": pytest.approx(200 / 3), "b": pytest.approx(200 / 3), "c": 0
    }  # fmt: skip
