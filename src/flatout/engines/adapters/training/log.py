"""The log of a run of adapters: a line per report of a phase."""

from __future__ import annotations

from dataclasses import dataclass, field

from flatout.engines.run.log import LogKind
from flatout.ground.codec import encode


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
