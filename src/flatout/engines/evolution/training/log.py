"""The log of a run of evolution: a line per epoch.

An epoch without an evaluation has no held-out reward, not 0.  A run that resumes from a checkpoint does some
epochs a second time, and the later line counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.codec import encode
from flatout.engines.run import log

NO_CURVES = ("epoch", "epochs", "statistics")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRecord:
    """One epoch of a run; None is not known."""

    epoch: int
    epochs: int | None = None  # of the whole run
    reward_train: float | None = None  # mean over members and prompts
    reward_heldout: float | None = None  # of the model itself, unperturbed
    rewards_per_s: float | None = None
    tokens_per_s: float | None = None
    plain_share: float | None = None  # speed relative to plain inference of the same rows; 1.0 costs nothing
    failed_rows: int | None = None
    elapsed_s: float | None = None  # since the run began, resumed ones included
    statistics: dict[str, float | None] = field(default_factory=dict)  # of the update, by name


KIND = log.LogKind(
    format="flatout-evolution-log",
    version=1,
    what="an evolution run",
    record=EpochRecord,
    key=lambda record: (record.epoch,),
    curves=lambda record: {"evolution": _curves(encode(record))},
)


def read_log(folder: Path) -> list[EpochRecord]:
    """The epochs of a run in their order, each as it was done last."""
    return log.read_log(folder, KIND)


def _curves(values: dict[str, Any]) -> dict[str, Any]:
    named = {name: value for name, value in values.items() if name not in NO_CURVES}
    return {**named, **values["statistics"]}
