"""A phase on disk: what it takes to resume bit for bit, and the best weights so far.

    OUT/phase1/step-000400/training.safetensors   weights and optimizer state as they are
    OUT/phase1/step-000400/best.safetensors       the weights that did best on held-out rows
    OUT/phase1/step-000400/state.json             the step, the settings, the model they belong to

Batches and dropout are functions of the seed and the step, so no generator's state is kept.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from flatout.engines.run.checkpoints import Checkpoint, Checkpoints

PHASES = ("phase1", "phase2", "phase3")
TRAINING, BEST = "training", "best"
VERSION = CHOSEN_BY_HASH = 2  # version 1 was judged on the first rows of a split


@dataclass(frozen=True, kw_only=True, slots=True)
class BestSoFar:
    """How one adapter, or the router, does on held-out rows; `done` is the step at which it was finished.

    `left_because` says why it left where that was neither its schedule nor its patience.
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
        """Count one more evaluation; (what follows, whether its weights are the best so far)."""
        if not math.isnan(score) and (self.best_score is None or score > self.best_score):
            return BestSoFar(best_score=score, best_step=step, scores=scores), True
        waited = self.evaluations_without_better + 1
        done = step if patience is not None and waited >= patience else None
        return dataclasses.replace(self, evaluations_without_better=waited, done=done), False


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseState:
    """The small part of a checkpoint."""

    FORMAT: ClassVar[str] = "flatout-adapters-checkpoint"

    phase: str
    step: int  # steps that are complete
    steps: int  # of the whole phase
    finished: bool
    config: dict[str, Any]  # the settings of the run
    fingerprint: str  # of the frozen encoder
    threads: int  # CPU threads; another number may round sums in another order
    progress: dict[str, BestSoFar] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # what the optimizers keep beside tensors
    elapsed_s: float = 0.0
    format: str = FORMAT
    version: int = VERSION


PhaseCheckpoint = Checkpoint[PhaseState]


def checkpoints_of(out: Path, phase: str) -> Checkpoints[PhaseState]:
    """The checkpoints of one phase of a run."""
    return Checkpoints(out / phase, counter="step", state=PhaseState, extra="adapters", version=VERSION)
