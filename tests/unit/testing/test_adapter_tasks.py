"""The contract finds a task that breaks it; tests/unit/engines/adapters/tasks holds the five tasks to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from flatout.engines.adapters.lora.token_blocks import Padding, Targets
from flatout.engines.adapters.tasks.kinds.sentiment import Sentiment
from flatout.engines.adapters.tasks.task import Example, TaskBatch
from flatout.testing.adapter_tasks import AdapterTaskContract


@dataclass(frozen=True, kw_only=True)
class ForgetsPadding(Sentiment):
    """Labels of padding rows are real ones."""

    def pad_targets(self, examples: Sequence[Example], to: Padding) -> Targets:
        return {"label": np.zeros(to.rows, dtype=np.int64)}


@dataclass(frozen=True, kw_only=True)
class SumsUp(Sentiment):
    """The loss is a sum, not a mean."""

    def loss(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch) -> Tensor:
        return super().loss(head, states_BLH, batch) * batch.count


@dataclass(frozen=True, kw_only=True)
class TakesAnything(Sentiment):
    """A line without a text is read."""

    def record_of(self, row: Any, *, answered: bool = True) -> Any:
        return dict(row)


def contract(broken: Sentiment) -> AdapterTaskContract:
    return type("Contract", (AdapterTaskContract,), {"task": broken})()


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (ForgetsPadding(), "test_padding_changes_neither_loss_nor_predictions"),
        (ForgetsPadding(), "test_targets_go_by_rows_or_are_listed"),
        (SumsUp(), "test_the_loss_is_the_mean_over_single_targets"),
        (TakesAnything(), "test_a_field_that_is_missing_is_named"),
    ],
)
def test_a_task_that_breaks_its_contract_fails(broken: Sentiment, test: str) -> None:
    with pytest.raises(AssertionError):
        getattr(contract(broken), test)()
    getattr(contract(Sentiment()), test)()
