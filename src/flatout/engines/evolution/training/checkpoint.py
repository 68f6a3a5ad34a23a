"""A run on disk: what it takes to go on bit for bit, written so that a kill at any moment leaves a whole one.

    OUT/checkpoints/epoch-000012/tensors.safetensors    fp32 masters and the optimizer's state
    OUT/checkpoints/epoch-000012/state.json             the epoch, the config, the model it belongs to

Noise is a function of the seed and the epoch, so no generator's state is kept.  A checkpoint is written into
a temporary folder that is renamed when complete: a folder with the right name is a whole checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.atomic_files import whole_folder
from flatout.codec import WrongShape, decode, encode
from flatout.errors import BadInput, import_extra

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
TENSORS, STATE = "tensors.safetensors", "state.json"
NAME = re.compile(r"epoch-(\d{6})")
SAMPLES = 1024  # values of each parameter that tell one model from another


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The small part of a checkpoint."""

    epoch: int  # epochs that are complete
    config: dict[str, Any]
    fingerprint: str  # of the model before training
    threads: int  # CPU threads; another number may round sums in another order
    rows: int
    chunk_members: int
    max_tokens: int
    untrained_score: float | None
    elapsed_s: float
    version: int = VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A whole checkpoint."""

    state: State
    tensors: dict[str, Tensor]


def save(folder: Path, *, state: State, tensors: Mapping[str, Tensor], keep: int = 2) -> Path:
    """Write a checkpoint below `folder` and remove all but the last `keep`."""
    safetensors = import_extra("safetensors", extra="evolution")
    torch_files = import_extra("safetensors.torch", extra="evolution")
    final = folder / f"epoch-{state.epoch:06d}"
    if not final.exists():
        try:
            with whole_folder(final) as partial:
                whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
                torch_files.save_file(whole, partial / TENSORS)
                (partial / STATE).write_text(json.dumps(encode(state), indent=2) + "\n", encoding="utf-8")
        except (OSError, safetensors.SafetensorError) as error:
            raise BadInput(
                f"the checkpoint {final} cannot be written: {error}",
                hint="free some space and go on with --resume from the one before",
            ) from error
    for old in epochs(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def epochs(folder: Path) -> list[Path]:
    """The whole checkpoints below `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))


def latest(folder: Path) -> Checkpoint | None:
    """The last checkpoint below `folder`."""
    found = epochs(folder)
    return load(found[-1]) if found else None


def load(path: Path) -> Checkpoint:
    """Read one checkpoint, or say which file cannot be read."""
    state = read_state(path)
    safetensors = import_extra("safetensors", extra="evolution")
    torch_files = import_extra("safetensors.torch", extra="evolution")
    try:
        tensors = torch_files.load_file(path / TENSORS)
    except (OSError, safetensors.SafetensorError) as error:
        raise _damaged(path / TENSORS, error) from error
    return Checkpoint(state=state, tensors=tensors)


def read_state(path: Path) -> State:
    """The small part of one checkpoint."""
    try:
        data = json.loads((path / STATE).read_text(encoding="utf-8"))
        state = decode(State, data)
    except (OSError, ValueError, WrongShape) as error:
        raise _damaged(path / STATE, error) from error
    if state.version > VERSION:
        raise BadInput(
            f"{path} is a checkpoint of version {state.version}; this flatout reads {VERSION}",
            hint="install a later flatout",
        )
    return state


def fingerprint(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """A name for a model's weights: shapes and a sample of the values of every parameter."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(parameters, key=lambda item: item[0]):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLES)].float().cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _damaged(path: Path, error: Exception) -> BadInput:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return BadInput(
        f"{path} cannot be read: {reason}", hint=f"remove {path.parent.name} to resume from the one before"
    )
