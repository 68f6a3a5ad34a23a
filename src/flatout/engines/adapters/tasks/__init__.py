"""What adapters are trained on: one file per task, found by being here.

Task          rows, tokens and targets, head, loss and scores of one task
known_tasks   every task of this folder, and of a folder of the user's
task_named    one of them by its name
"""

from __future__ import annotations

from flatout.engines.adapters.tasks.known import known_tasks, task_named
from flatout.engines.adapters.tasks.task import (
    DataOptions,
    Example,
    Prediction,
    Record,
    Splits,
    Task,
    TaskBatch,
    encode_all,
)

__all__ = [
    "DataOptions",
    "Example",
    "Prediction",
    "Record",
    "Splits",
    "Task",
    "TaskBatch",
    "encode_all",
    "known_tasks",
    "task_named",
]
