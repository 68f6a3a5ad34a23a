"""What an evaluation found, apart from how it was measured and how it is drawn.

One JSON file in the run's folder, so that a report can be made again without the model, without torch and on
another machine.

    oracle       every row under its own task's adapter: what a perfect router would reach
    routed       under the adapters that the router chose
    end-to-end   the same, and a row that was taken for another task's counts as not answered
    single       all rows under one adapter, the one named; there is one such entry per adapter
    uniform      all adapters at once, with equal weights
    random       an adapter drawn for each row

Except in end-to-end, a row's answer comes from its own task's head; only the adapter beneath it changes.
End-to-end is what a user gets who sends a text without naming its task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from flatout.ground.documents import DocumentKind
from flatout.ground.errors import BadInput

FILE = "evaluation.json"
KIND = DocumentKind(
    format="flatout-adapters-evaluation",
    version=1,
    what="an evaluation of flatout adapt",
    hint="run flatout adapt evaluate",
)

RoutingName = Literal["oracle", "routed", "end-to-end", "single", "uniform", "random"]
ROUTINGS: tuple[RoutingName, ...] = ("oracle", "routed", "end-to-end", "single", "uniform", "random")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingScores:
    """The scores of every task under one routing, in points up to 100."""

    routing: RoutingName
    by_task: dict[str, dict[str, float]]
    adapter: str | None = None  # the one that all rows ran under


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassScore:
    """One class of a task under its own adapter: its rows, and its F1 in points."""

    num_rows: int
    f1: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfidenceBin:
    """Rows whose confidence lies between two bounds, and how many of them were routed correctly."""

    low: float
    high: float
    num_rows: int
    num_right: int
    mean_confidence: float | None = None  # None without rows

    @property
    def right_share(self) -> float | None:
        return self.num_right / self.num_rows if self.num_rows else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingQuality:
    """How well the router distinguishes tasks, on rows it has not seen."""

    accuracy_share: float
    accuracy_by_task: dict[str, float | None]  # None without rows
    confusion: tuple[tuple[int, ...], ...]  # rows of task i for which adapter j was chosen first
    entropy_nats: float  # of a row's probabilities, on average
    needed_share: dict[str, float]  # of the rows, by the task they belong to
    used_share: dict[str, float]  # of the weights, by the adapter that got them
    balance: float | None  # entropy of use over its largest value: 1 is even, 0 one adapter only
    calibration_error: float  # mean distance of confidence from the share that is right
    bins: tuple[ConfidenceBin, ...]
    threshold: float
    top_k: int
    fallback: str
    sure_share: float  # rows whose confidence reaches the threshold
    sure_accuracy_share: float | None  # of those
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRow:
    """One record and the model's answer."""

    task: str
    fields: dict[str, str]
    answers: dict[str, str]  # by routing
    adapter: str | None = None  # that the router chose
    confidence: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Every score of a run, and what its router does."""

    tasks: tuple[str, ...]
    metrics: dict[str, str]  # by task: the score that stands for all
    num_rows: dict[str, int]
    scores: tuple[RoutingScores, ...]
    routing: RoutingQuality | None = None  # None before the router is trained
    heads_only: dict[str, dict[str, float]] | None = None  # of a run without adapters, by task
    shown: tuple[ShownRow, ...] = ()
    split: str = "test"
    elapsed_s: float | None = None
    notes: tuple[str, ...] = field(default=())
    classes: dict[str, dict[str, ClassScore]] = field(default_factory=dict)  # by task that has some

    def score_names(self, task: str) -> list[str]:
        """List the scores of a task, its metric first."""
        found = (name for each in self.scores for name in each.by_task.get(task, {}))
        return list(dict.fromkeys((self.metrics[task], *found)))

    def score(
        self, task: str, routing: RoutingName, *, adapter: str | None = None, name: str | None = None
    ) -> float | None:
        """Return a task's score of this name, by default its metric.

        "single" without an adapter takes the one whose metrics are best on average.
        """
        if routing == "single" and adapter is None:
            adapter = self.best_single
        for each in self.scores:
            if each.routing == routing and (routing != "single" or each.adapter == adapter):
                return each.by_task.get(task, {}).get(name or self.metrics[task])
        return None

    def heads_only_score(self, task: str, *, name: str | None = None) -> float | None:
        return (self.heads_only or {}).get(task, {}).get(name or self.metrics[task])

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that all rows ran under."""
        return tuple(each.adapter for each in self.scores if each.adapter is not None)

    @property
    def best_single(self) -> str | None:
        """The adapter that does best on average over the tasks."""
        means = {
            adapter: mean
            for adapter in self.adapters
            if (mean := self._mean([self.score(task, "single", adapter=adapter) for task in self.tasks]))
            is not None
        }
        return max(means, key=lambda adapter: means[adapter]) if means else None

    def mean(self, routing: RoutingName) -> float | None:
        """Return the mean of all tasks' metrics."""
        return self._mean([self.score(task, routing) for task in self.tasks])

    @staticmethod
    def _mean(values: Sequence[float | None]) -> float | None:
        """Return the mean; None if a value is unknown, because means over different tasks do not compare."""
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None


def with_heads_only(evaluation: Evaluation, other: Evaluation) -> Evaluation:
    """Return the evaluation with the scores of a run without adapters added, task by task."""
    oracle = next((each for each in other.scores if each.routing == "oracle"), None)
    if oracle is None or not set(oracle.by_task) & set(evaluation.tasks):
        raise BadInput(
            f"the run without adapters scored {', '.join(other.tasks) or 'nothing'},"
            f" this one {', '.join(evaluation.tasks)}",
            hint="train it on the same settings with --heads-only",
        )
    differ = [
        f"{task} ({other.num_rows[task]} rows, not {evaluation.num_rows[task]})"
        for task in evaluation.tasks
        if task in other.num_rows and other.num_rows[task] != evaluation.num_rows[task]
    ]
    notes = (f"The run without adapters was scored on other rows: {'; '.join(differ)}.",) if differ else ()
    return replace(evaluation, heads_only=oracle.by_task, notes=evaluation.notes + notes)
