"""What a run of evolution writes down: a line of log per epoch, and the state in a checkpoint.

An epoch without an evaluation has no held-out reward, not 0.  A run that resumes repeats some epochs, and the
later line counts.  Noise is a function of the seed and the epoch, so a checkpoint keeps no generator's state:
the masters, the optimizer's state and this state are enough to continue bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.engines.run import log
from flatout.engines.run.checkpoints import Checkpoints
from flatout.ground.codec import encode

NO_CURVES = ("epoch", "epochs", "statistics", "samples", "perturbed", "frozen")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownAnswer:
    """What the weights answered to a held-out prompt; a reward of None: it failed, or does not apply."""

    prompt: str
    completion: str
    reward: float | None


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
    sigma: float | None = None  # what the members of the epoch ran with
    lr: float | None = None
    sent_bytes: int | None = None  # to other ranks, by the first one, since the record before
    elapsed_s: float | None = None  # since the run began, resumed ones included
    statistics: dict[str, float | None] = field(default_factory=dict)  # of the update, by name
    samples: tuple[ShownAnswer, ...] = ()  # of an evaluation
    perturbed: tuple[str, ...] = ()  # of the first record: the weights that get noise
    frozen: tuple[str, ...] = ()  # and those that get none


def _curves(record: EpochRecord) -> dict[str, Any]:
    values = {name: value for name, value in encode(record).items() if name not in NO_CURVES}
    return {"evolution": {**values, **record.statistics}}


KIND = log.LogKind(
    format="flatout-evolution-log",
    version=1,
    what="an evolution run",
    record=EpochRecord,
    key=lambda record: (record.epoch,),
    curves=_curves,
)


def read_log(folder: Path) -> list[EpochRecord]:
    """Read the epochs of a run in their order, each as it was written last."""
    return log.read_log(folder, KIND)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvolutionState:
    """The state of a run in a checkpoint."""

    epoch: int  # epochs that are complete
    config: dict[str, Any]  # the settings
    fingerprint: str  # of the weights before training
    threads: int  # CPU threads; another number may round sums in another order
    rows: int
    chunk_members: int
    max_tokens: int
    untrained_score: float | None
    elapsed_s: float
    version: int = 1


def checkpoints_of(out: Path) -> Checkpoints[EvolutionState]:
    """Return the checkpoints of the run in a folder."""
    return Checkpoints(out / "checkpoints", counter="epoch", state=EvolutionState, extra="evolution")
