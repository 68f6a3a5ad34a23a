"""Checkpoints of a run: enough to continue bit for bit, and complete even if the process is killed.

    OUT/checkpoints/epoch-000012/tensors.safetensors    any number of files with tensors
    OUT/checkpoints/epoch-000012/state.json             how far the run is, under which settings

A checkpoint is written into a temporary folder that is renamed when complete: a folder with the right name is
a complete checkpoint.  An engine declares its state as a dataclass with a `version` and, if it has one, a
`format`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flatout.engines.run.models import first_line
from flatout.engines.run.tensor_files import file_errors, load_tensors
from flatout.ground.atomic_files import whole_folder, write_whole
from flatout.ground.codec import WrongShape, decode, encode
from flatout.ground.errors import BadInput, import_extra

if TYPE_CHECKING:
    from torch import Tensor

STATE = "state.json"
State = TypeVar("State")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint(Generic[State]):
    """A complete checkpoint on disk and its state; tensors are read on use."""

    path: Path
    state: State
    extra: str

    def tensors(self, name: str = "tensors") -> dict[str, Tensor]:
        """Read the tensors of one file."""
        path = self.path / f"{name}.safetensors"
        return load_tensors(path, extra=self.extra, hint=_remove_hint(self.path))


class Checkpoints(Generic[State]):
    """The checkpoints below a folder, named by a counter: `epoch-000012`."""

    def __init__(
        self, folder: Path, *, counter: str, state: type[State], extra: str, version: int = 1
    ) -> None:
        """Name in `extra` the extra of Flatout that brings safetensors to this engine."""
        self.folder, self._counter, self._state = folder, counter, state
        self._extra, self._version = extra, version

    def save(
        self, number: int, *, state: State, files: Mapping[str, Mapping[str, Tensor]], keep: int = 2
    ) -> Path:
        """Write the checkpoint of a step and remove all but the last `keep`.

        A step always has the same tensors, so saving it again writes only its state.
        """
        final = self.folder / f"{self._counter}-{number:06d}"
        small = (json.dumps(encode(state), indent=2) + "\n").encode()
        if final.exists():
            write_whole(final / STATE, small)
            return final
        torch_files = import_extra("safetensors.torch", extra=self._extra)
        try:
            with whole_folder(final) as partial:
                for name, tensors in files.items():
                    whole = {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}
                    torch_files.save_file(whole, partial / f"{name}.safetensors")
                (partial / STATE).write_bytes(small)
        except file_errors(self._extra) as error:
            raise BadInput(
                f"the checkpoint {final} cannot be written: {error}",
                hint="free some space and continue with --resume from the previous one",
            ) from error
        for old in self.paths()[:-keep]:
            shutil.rmtree(old)
        return final

    def paths(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        name = re.compile(rf"{self._counter}-\d{{6,}}")
        whole = [path for path in self.folder.iterdir() if name.fullmatch(path.name)]
        return sorted(whole, key=lambda path: int(path.name.rpartition("-")[2]))

    def latest(self) -> Checkpoint[State] | None:
        """Return the last checkpoint, its tensors not read yet."""
        found = self.paths()
        if not found:
            return None
        return Checkpoint(path=found[-1], state=self.read_state(found[-1]), extra=self._extra)

    def read_state(self, path: Path) -> State:
        """Read the state of one checkpoint; BadInput says what is wrong with it."""
        try:
            data = json.loads((path / STATE).read_text(encoding="utf-8"))
            state: Any = decode(self._state, data)
        except (OSError, ValueError, WrongShape) as error:
            raise BadInput(
                f"{path / STATE} cannot be read: {first_line(error)}", hint=_remove_hint(path)
            ) from error
        wanted = getattr(self._state, "FORMAT", None)
        if wanted is not None and state.format != wanted:
            raise BadInput(f"{path} is not a {wanted} but {state.format!r}", hint="choose another --out")
        if state.version > self._version:
            raise BadInput(
                f"{path} is a checkpoint of version {state.version}; this flatout reads {self._version}",
                hint="install a newer flatout",
            )
        return state  # type: ignore[no-any-return]


def thread_note(saved_threads: int, *, on_cpu: bool) -> str | None:
    """Note that a run resumes with another number of CPU threads: sums round in another order."""
    import torch

    if not on_cpu or saved_threads == torch.get_num_threads():
        return None
    return (
        f"the run had {saved_threads} threads and has {torch.get_num_threads()} here: "
        "it may differ from an uninterrupted one in the last bits"
    )


def _remove_hint(checkpoint: Path) -> str:
    return f"remove {checkpoint} to resume from the previous one"
