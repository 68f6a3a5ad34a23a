"""Evaluations and logs of adapters runs that were never run, for what only reads them."""

from __future__ import annotations

import math
import random
from typing import Any

from flatout.engines.adapters.evaluation.results import (
    ConfidenceBin,
    Evaluation,
    RoutingQuality,
    Scores,
    ShownRow,
)
from flatout.engines.adapters.report.page import RunReport
from flatout.engines.adapters.training.log import StepRecord

HOSTILE = "<script>alert(1)</script>\"'& $x_2$ \u202e\x00"
METRICS = {
    "sentiment": "accuracy",
    "qa": "f1",
    "summarisation": "rouge_l",
    "code": "bleu",
    "translation": "bleu",
}
TASKS = tuple(METRICS)
OWN = {"sentiment": 84.2, "qa": 61.5, "summarisation": 31.0, "code": 22.4, "translation": 38.9}
TERMS = ("router", "confidence", "balance", "efficiency", "consistency", "entropy", "temperature")


def scores(routing: Any, less: float, *, adapter: str | None = None) -> Scores:
    """Every task some points below what its own adapter reaches; at home, `adapter` loses nothing."""
    return Scores(
        routing=routing,
        adapter=adapter,
        by_task={
            task: {METRICS[task]: max(own - (0 if task == adapter else less), 0.0), "other": 50.0}
            for task, own in OWN.items()
        },
    )


def quality(**changes: Any) -> RoutingQuality:
    """A good router that takes some code for translations."""
    confusion = (
        (500, 0, 0, 0, 0), (2, 498, 0, 0, 0), (0, 4, 496, 0, 0), (0, 0, 1, 462, 37), (0, 0, 0, 9, 491),
    )  # fmt: skip
    counts = (4, 6, 9, 14, 20, 33, 52, 96, 240, 2026)
    bins = tuple(
        ConfidenceBin(
            low=number / 10,
            high=(number + 1) / 10,
            num_rows=count,
            num_right=round(count * (number + 0.6) / 10.2),
            mean_confidence=(number + 0.55) / 10,
        )
        for number, count in enumerate(counts)
    )
    values: dict[str, Any] = {
        "accuracy_share": sum(confusion[i][i] for i in range(5)) / 2500,
        "accuracy_by_task": {task: confusion[i][i] / 500 for i, task in enumerate(TASKS)},
        "confusion": confusion,
        "entropy_nats": 0.11,
        "needed_share": dict.fromkeys(TASKS, 0.2),
        "used_share": dict(zip(TASKS, (0.201, 0.201, 0.199, 0.188, 0.211), strict=True)),
        "balance": 0.9996,
        "calibration_error": 0.018,
        "bins": bins,
        "threshold": 0.6,
        "top_k": 2,
        "fallback": "uniform",
        "sure_share": 0.966,
        "sure_accuracy_share": 0.991,
        "temperature": 0.94,
    }
    return RoutingQuality(**{**values, **changes})


def evaluation(**changes: Any) -> Evaluation:
    """A whole evaluation with everything that a report can show."""
    values: dict[str, Any] = {
        "tasks": TASKS,
        "metrics": METRICS,
        "num_rows": dict.fromkeys(TASKS, 500),
        "scores": (
            scores("oracle", 0.0),
            scores("routed", 0.6),
            scores("end-to-end", 1.4),
            *(scores("single", 14.0 + number, adapter=task) for number, task in enumerate(TASKS)),
            scores("uniform", 9.0),
            scores("random", 19.0),
        ),
        "routing": quality(),
        "heads_only": {task: {METRICS[task]: own - 4.1} for task, own in OWN.items()},
        "shown": tuple(
            ShownRow(
                task=task,
                fields={"text": f"a row of {task}, " + "with some words " * 4, "label": "yes"},
                answers={"oracle": "yes", "routed": "" if task == "qa" else "yes"},
                adapter=task,
                confidence=0.97,
            )
            for task in TASKS
        ),
        "elapsed_s": 42.0,
    }
    return Evaluation(**{**values, **changes})


def log(*, steps: int = 400, every: int = 5) -> tuple[StepRecord, ...]:
    """The three phases of a run, with noise and with evaluations now and then."""
    drawn = random.Random(0)
    records = []
    for phase in ("phase1", "phase2", "phase3"):
        for step in range(every, steps + 1, every):
            falls = math.exp(-step / 120) + 0.05 * drawn.random()
            is_checked = step % 50 == 0
            tasks = {task: (1 + place) * falls for place, task in enumerate(TASKS)}
            terms = {term: falls / (1 + place) for place, term in enumerate(TERMS)}
            checked = {
                task: {"loss": (1 + place) * falls * 1.1, METRICS[task]: OWN[task] * (1 - falls / 2)}
                for place, task in enumerate(TASKS)
            }
            records.append(
                StepRecord(
                    phase=phase,
                    step=step,
                    losses={**(tasks if phase != "phase2" else {}), **(terms if phase != "phase1" else {})},
                    validation=checked if is_checked and phase != "phase2" else {},
                    routing={"accuracy": 1 - falls / 2} if is_checked and phase != "phase1" else {},
                )
            )
    return tuple(records)


def report(**changes: Any) -> RunReport:
    values: dict[str, Any] = {
        "name": "five-tasks",
        "model": "models/all-MiniLM-L6-v2",
        "evaluation": evaluation(),
        "records": log(),
        "device": "NVIDIA H200",
        "notes": ("12 rows of qa were left out: their answer lies behind the last token.",),
    }
    return RunReport(**{**values, **changes})


def hostile_report() -> RunReport:
    """Every text a stranger could have written."""
    bad = HOSTILE + "x" * 300
    found = Evaluation(
        tasks=(bad, "b"),
        metrics={bad: HOSTILE, "b": "f1"},
        num_rows={bad: 1, "b": 0},
        scores=(
            Scores(routing="oracle", by_task={bad: {HOSTILE: 1e9}, "b": {"f1": -3.0}}),
            Scores(routing="single", adapter=bad, by_task={bad: {HOSTILE: 3.0}, "b": {"f1": 1.0}}),
            Scores(routing="single", adapter="b", by_task={bad: {HOSTILE: 3.0}, "b": {"f1": 1.0}}),
        ),
        routing=quality(
            confusion=((1, 0), (0, 0)),
            accuracy_by_task={bad: 1.0, "b": None},
            needed_share={bad: 1.0, "b": 0.0},
            used_share={bad: 1.0, "b": 0.0},
            sure_accuracy_share=None,
            balance=None,
        ),
        shown=(
            ShownRow(task=bad, fields={HOSTILE: HOSTILE * 30}, answers={HOSTILE: "y" * 5000}, adapter=bad),
        ),
        split=HOSTILE,
        notes=(HOSTILE,),
    )
    records = (
        StepRecord(phase="phase1", step=1, losses={bad: 1e30}, validation={bad: {HOSTILE: None}}),
        StepRecord(phase="phase2", step=1, routing={bad: 0.5}),
    )
    return RunReport(name=bad, model=HOSTILE, evaluation=found, records=records, device=HOSTILE)
