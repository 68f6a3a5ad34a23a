"""Regression: values in their own unit outside, in units of their deviation inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.engines.adapters.tasks.data_rows import Splits
from flatout.engines.adapters.tasks.kinds.regression import Regression
from flatout.engines.adapters.tasks.task import encode_all
from flatout.ground.errors import BadInput
from flatout.testing.adapter_tasks import make_head, make_states, tiny_tokenizer


def splits(*values: float) -> Splits:
    rows = [{"text": f"row {number}", "value": value} for number, value in enumerate(values)]
    return Splits(train=rows, validation=[], test=[], origin="rows.jsonl")


def test_mean_and_deviation_are_those_of_the_training_rows() -> None:
    assert Regression().settings_from(splits(1000.0, 1002.0)) == {"mean": 1001.0, "deviation": 1.0}
    with pytest.raises(BadInput, match=r"every training row .* has the value 3"):
        Regression().settings_from(splits(3.0, 3.0))


@pytest.mark.parametrize("value", [None, "much", True, float("nan"), float("inf")])
def test_what_is_not_a_number_is_refused(value: Any) -> None:
    with pytest.raises(BadInput, match="'value' is"):
        Regression().record_of({"text": "x", "value": value})
    assert Regression().record_of({"text": "x", "score": "1.5"}) == {"text": "x", "value": 1.5}


def test_a_prediction_is_in_the_unit_of_the_rows_and_the_loss_is_not() -> None:
    """The same head on the same texts: another unit changes what it says, and not what it learns."""
    said, losses = [], []
    for unit in (1.0, 1000.0):
        task = Regression(mean=2.0 * unit, deviation=0.5 * unit)
        rows = [{"text": f"row {number}", "value": (1.5 + number / 2) * unit} for number in range(3)]
        examples, _ = encode_all(task, rows, tiny_tokenizer(), max_length=50, training=True)
        batch = task.collate(examples, adapter=0, pad_id=0)
        head, states = make_head(task), make_states(batch)
        losses.append(task.loss(head, states, batch))
        found = task.predict(head, states, batch, tokenizer=tiny_tokenizer(), records=rows)
        said.append([float(one.text or "") / unit for one in found])
    torch.testing.assert_close(losses[0], losses[1])
    assert said[0] == pytest.approx(said[1], rel=1e-4)


def test_a_row_without_an_answer_counts_as_the_mean() -> None:
    rows = splits(0.0, 4.0).train
    assert Regression().text_scores(["", ""], rows) == {"explained": 0.0, "pearson": 0.0, "spearman": 0.0}
    assert Regression().text_scores(["0", "4"], rows)["explained"] == 100
