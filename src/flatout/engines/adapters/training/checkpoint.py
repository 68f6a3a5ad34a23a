"""A phase on disk: what it takes to go on bit for bit, and the best weights so far.

    OUT/phase1/step-000400/training.safetensors   weights and optimizer state as they are
    OUT/phase1/step-000400/best.safetensors       the weights that did best on rows held out
    OUT/phase1/step-000400/state.json             the step, the settings, the model they belong to

Batches and dropout are functions of the seed and the step, so no generator's state is kept.  A checkpoint is
written into a temporary folder that is renamed when complete: a folder with the right name is a whole
checkpoint, whenever the process was killed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.atomic_files import whole_folder, write_whole
from flatout.codec import WrongShape, decode, encode
from flatout.errors import BadInput, import_extra

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, VERSION = "flatout-adapters-checkpoint", 1
TRAINING, BEST, STATE = "training.safetensors", "best.safetensors", "state.json"
NAME = re.compile(r"step-(\d{6,})")
SAMPLES = 1024  # values of each parameter that tell one model from another
PHASES = ("phase1", "phase2", "phase3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One adapter, or the router, on its way: `done` is the step at which it was finished.

    `left_because` says why it left where that was neither its schedule nor its patience.
    """

    best_score: float | None = None  # higher is better; None before the first evaluation
    best_step: int | None = None
    scores: dict[str, float] = field(default_factory=dict)  # of the best weights
    evaluations_without_better: int = 0
    done: int | None = None
    left_because: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The small part of a checkpoint."""

    phase: str
    step: int  # steps that are complete
    steps: int  # of the whole phase
    finished: bool
    config: dict[str, Any]
    fingerprint: str  # of the frozen encoder
    threads: int  # CPU threads; another number may round sums in another order
    progress: dict[str, Progress] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # what the optimizers keep beside tensors
    elapsed_s: float = 0.0
    format: str = FORMAT
    version: int = VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Where a whole checkpoint lies and its small part; tensors are read when they are asked for."""

    path: Path
    state: State

    def training(self) -> dict[str, Tensor]:
        return _read_tensors(self.path / TRAINING)

    def best(self) -> dict[str, Tensor]:
        return _read_tensors(self.path / BEST)


def save(
    folder: Path,
    *,
    state: State,
    training: Mapping[str, Tensor],
    best: Mapping[str, Tensor],
    keep: int = 2,
) -> Path:
    """Write a checkpoint below `folder` and remove all but the last `keep`."""
    final = folder / f"step-{state.step:06d}"
    small = (json.dumps(encode(state), indent=2) + "\n").encode()
    if final.exists():
        # The weights of a step are the same whenever it is kept; whether it was the last is not.
        write_whole(final / STATE, small)
        return final
    safetensors = import_extra("safetensors", extra="adapters")
    try:
        with whole_folder(final) as partial:
            _write_tensors(partial / TRAINING, training)
            _write_tensors(partial / BEST, best)
            (partial / STATE).write_bytes(small)
    except (OSError, safetensors.SafetensorError) as error:
        raise BadInput(
            f"the checkpoint {final} cannot be written: {error}",
            hint="free some space and go on with --resume from the one before",
        ) from error
    for old in steps(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def steps(folder: Path) -> list[Path]:
    """The whole checkpoints below `folder`, oldest first."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if NAME.fullmatch(path.name))
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Checkpoint | None:
    """The last checkpoint below `folder`."""
    found = steps(folder)
    return Checkpoint(path=found[-1], state=read_state(found[-1])) if found else None


def read_state(path: Path) -> State:
    """The small part of one checkpoint."""
    try:
        data = json.loads((path / STATE).read_text(encoding="utf-8"))
        state = decode(State, data)
    except (OSError, ValueError, WrongShape) as error:
        raise _damaged(path / STATE, error) from error
    if state.format != FORMAT:
        raise BadInput(f"{path} is no checkpoint of adapters but {state.format!r}")
    if state.version > VERSION:
        raise BadInput(
            f"{path} is a checkpoint of version {state.version}; this flatout reads {VERSION}",
            hint="install a later flatout",
        )
    return state


def check_model(state: State, *, fingerprint: str, model: str, path: Path) -> None:
    """BadInput where a checkpoint belongs to another encoder."""
    if state.fingerprint != fingerprint:
        raise BadInput(
            f"the checkpoint {path} belongs to another model than {model}",
            hint="go on with the model that the run began with",
        )


def fingerprint(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """A name for a model's weights: shapes and a sample of the values of every parameter."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(parameters, key=lambda item: item[0]):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLES)].float().cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    safetensors = import_extra("safetensors.torch", extra="adapters")
    safetensors.save_file(
        {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, path
    )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    safetensors = import_extra("safetensors", extra="adapters")
    torch_files = import_extra("safetensors.torch", extra="adapters")
    try:
        tensors: dict[str, Tensor] = torch_files.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise _damaged(path, error) from error
    return tensors


def _damaged(path: Path, error: Exception) -> BadInput:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return BadInput(
        f"{path} cannot be read: {reason}", hint=f"remove {path.parent} to resume from the one before"
    )
