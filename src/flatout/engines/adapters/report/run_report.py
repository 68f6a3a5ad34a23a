"""What is known of a run of adapters, and the sentence it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.engines.adapters.evaluation.results import Evaluation
from flatout.engines.adapters.training.records import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What is known of a run; an evaluation or a log may be missing."""

    name: str
    model: str
    evaluation: Evaluation | None = None
    records: tuple[StepRecord, ...] = ()
    device: str | None = None
    notes: tuple[str, ...] = ()

    def of_phase(self, phase: str) -> list[StepRecord]:
        return [record for record in self.records if record.phase == phase]

    def metric(self, task: str, records: Sequence[StepRecord]) -> str | None:
        """Return the score that represents a task; without an evaluation, the first in the log."""
        if self.evaluation is not None and task in self.evaluation.metrics:
            return self.evaluation.metrics[task]
        names = (name for record in records for name in record.validation.get(task, {}) if name != "loss")
        return next(names, None)


def headline(report: RunReport) -> str:
    """Say what the run found, in one sentence."""
    found = report.evaluation
    if found is None:
        return "Not evaluated yet." if report.records else "Nothing has been trained yet."
    if found.routing is None:
        tasks = "One task" if len(found.tasks) == 1 else f"{len(found.tasks)} tasks"
        return f"{tasks} under their own adapters; no router has been trained yet."
    share = found.routing.accuracy_share
    sentence = (
        f"The router sends {'100' if share == 1 else f'{100 * share:.1f}'} % of "
        f"{sum(found.num_rows.values()):,} unseen rows to the right adapter"
    )
    gap = largest_gap(found)
    if gap is None:
        return sentence + "."
    task, points = gap
    if points <= 0:
        return f"{sentence}; no task scores lower than under a perfect router."
    return f"{sentence}; against a perfect one that costs at most {points:.1f} points ({task})."


def largest_gap(evaluation: Evaluation) -> tuple[str, float] | None:
    """Return the task that loses most by routing, and how many points it loses."""
    gaps = {
        task: oracle - routed
        for task in evaluation.tasks
        if (oracle := evaluation.score(task, "oracle")) is not None
        and (routed := evaluation.score(task, "routed")) is not None
    }
    return max(gaps.items(), key=lambda item: item[1]) if gaps else None
