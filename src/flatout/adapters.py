"""Adapters: the names that a task or a program of your own needs.

    from flatout.adapters import AdapterTask, Example, Prediction

AdapterTask              the base of a task: rows, tokens and targets, head, loss and scores
Classification, Regression, Similarity, GenerationTask    tasks to begin from
PooledHead               a small network on the mean of a row's states
Example, Prediction, TaskBatch, IGNORED, encode_all    what a task takes and gives
known_tasks, task_named  tasks by name

`flatout.adapt` trains a run, as `flatout adapt` does.  Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.ground.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from flatout.engines.adapters.tasks.generation import GenerationTask as GenerationTask
    from flatout.engines.adapters.tasks.kinds.classification import Classification as Classification
    from flatout.engines.adapters.tasks.kinds.classification import PooledHead as PooledHead
    from flatout.engines.adapters.tasks.kinds.regression import Regression as Regression
    from flatout.engines.adapters.tasks.kinds.similarity import Similarity as Similarity
    from flatout.engines.adapters.tasks.known import known_tasks as known_tasks
    from flatout.engines.adapters.tasks.known import task_named as task_named
    from flatout.engines.adapters.tasks.task import IGNORED as IGNORED
    from flatout.engines.adapters.tasks.task import AdapterTask as AdapterTask
    from flatout.engines.adapters.tasks.task import Example as Example
    from flatout.engines.adapters.tasks.task import Prediction as Prediction
    from flatout.engines.adapters.tasks.task import TaskBatch as TaskBatch
    from flatout.engines.adapters.tasks.task import encode_all as encode_all
else:
    __all__, __getattr__, __dir__ = _lazy_names(__name__)
