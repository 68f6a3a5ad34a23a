"""The log of a run of adapters: a line per report of a phase.

A run that resumes does some steps a second time, and the later line counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.codec import encode
from flatout.engines.run import log


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One report of a phase; None is not known."""

    phase: str
    step: int
    losses: dict[str, float | None] = field(default_factory=dict)  # by task, or by the router's losses
    learning_rates: dict[str, float | None] = field(default_factory=dict)
    # By task: scores on rows held out, in points, and their loss.
    validation: dict[str, dict[str, float | None]] = field(default_factory=dict)
    routing: dict[str, float | None] = field(default_factory=dict)  # accuracy and the like
    tokens_per_s: float | None = None
    steps_per_s: float | None = None
    elapsed_s: float | None = None  # of the phase, resumed parts included
    notes: tuple[str, ...] = ()  # what happened since the last report


KIND = log.LogKind(
    format="flatout-adapters-log",
    version=1,
    what="an adapters run",
    record=StepRecord,
    key=lambda record: (record.phase, record.step),
    curves=lambda record: {
        record.phase: {name: value for name, value in encode(record).items() if name not in ("phase", "step")}
    },
)


class RunLog(log.RunLog[StepRecord]):
    """Writes the log of a run in `folder`."""

    def __init__(
        self, folder: Path, *, settings: Mapping[str, Any] | None = None, tensorboard: bool | None = None
    ) -> None:
        """`tensorboard` None means where it is installed; True insists on it."""
        super().__init__(folder, KIND, settings=settings, tensorboard=tensorboard)


def read_log(folder: Path) -> list[StepRecord]:
    """The reports of a run by phase and step, each as it was made last."""
    return log.read_log(folder, KIND)
