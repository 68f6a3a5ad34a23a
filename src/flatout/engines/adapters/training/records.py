"""What a run of adapters writes down: a line of log per report, and a checkpoint of each phase.

    OUT/log.jsonl                                 a line per report of a phase
    OUT/phase1/step-000400/training.safetensors   weights and optimizer state as they are
    OUT/phase1/step-000400/best.safetensors       the weights that did best on held-out rows
    OUT/phase1/step-000400/state.json             the step, the settings, the model they belong to

A checkpoint is all it takes to resume bit for bit.  Batches and dropout are functions of the seed and the
step, so it keeps no generator's state.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from flatout.engines.run.checkpoints import Checkpoint, Checkpoints
from flatout.engines.run.log import LogKind
from flatout.ground.codec import encode

PHASES = ("phase1", "phase2", "phase3")
TRAINING, BEST = "training", "best"
VERSION = CHOSEN_BY_HASH = 2  # version 1 was judged on the first rows of a split


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One report of a phase; None is not known."""

    phase: str
    step: int
    losses: dict[str, float | None] = field(default_factory=dict)  # by task, or by the router's losses
    learning_rates: dict[str, float | None] = field(default_factory=dict)
    # By task: scores on held-out rows, in points, and their loss.
    validation: dict[str, dict[str, float | None]] = field(default_factory=dict)
    routing: dict[str, float | None] = field(default_factory=dict)  # accuracy and the like
    tokens_per_s: float | None = None
    steps_per_s: float | None = None
    sent_bytes: int | None = None  # to other processes, by the first one, since the last report
    elapsed_s: float | None = None  # of the phase, resumed parts included
    notes: tuple[str, ...] = ()  # what happened since the last report


KIND = LogKind(
    format="flatout-adapters-log",
    version=1,
    what="an adapters run",
    record=StepRecord,
    key=lambda record: (record.phase, record.step),
    curves=lambda record: {
        record.phase: {name: value for name, value in encode(record).items() if name not in ("phase", "step")}
    },
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BestSoFar:
    """The best scores of one adapter, or of the router, on held-out rows; `done` is the step it ended at.

    `left_because` gives a reason other than the end of its schedule or patience.
    """

    best_score: float | None = None  # higher is better; None before the first evaluation
    best_step: int | None = None
    scores: dict[str, float] = field(default_factory=dict)  # of the best weights
    evaluations_without_better: int = 0
    done: int | None = None
    left_because: str | None = None

    def after(
        self, *, score: float, scores: dict[str, float], step: int, patience: int | None
    ) -> tuple[BestSoFar, bool]:
        """Count one more evaluation; return (the new state, whether its weights are the best so far)."""
        if not math.isnan(score) and (self.best_score is None or score > self.best_score):
            return BestSoFar(best_score=score, best_step=step, scores=scores), True
        waited = self.evaluations_without_better + 1
        done = step if patience is not None and waited >= patience else None
        return dataclasses.replace(self, evaluations_without_better=waited, done=done), False


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseState:
    """The state of a phase in a checkpoint."""

    FORMAT: ClassVar[str] = "flatout-adapters-checkpoint"

    phase: str
    step: int  # steps that are complete
    steps: int  # of the whole phase
    finished: bool
    config: dict[str, Any]  # the settings of the run
    fingerprint: str  # of the frozen encoder
    threads: int  # CPU threads; another number may round sums in another order
    progress: dict[str, BestSoFar] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # numbers of the optimizers' state
    elapsed_s: float = 0.0
    format: str = FORMAT
    version: int = VERSION


PhaseCheckpoint = Checkpoint[PhaseState]


def checkpoints_of(out: Path, phase: str) -> Checkpoints[PhaseState]:
    """Return the checkpoints of one phase of a run."""
    return Checkpoints(out / phase, counter="step", state=PhaseState, extra="adapters", version=VERSION)
