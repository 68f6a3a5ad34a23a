"""safetensors files: written whole or not at all, read in full or mapped, refused in one line.

`extra` names the extra of Flatout that brings safetensors to the engine that asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.engines.run.models import first_line
from flatout.ground.atomic_files import remove_leftovers, write_whole
from flatout.ground.errors import BadInput, import_extra

if TYPE_CHECKING:
    from torch import Tensor


def tensor_bytes(
    tensors: Mapping[str, Tensor], *, extra: str, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the content of a safetensors file."""
    save: Any = import_extra("safetensors.torch", extra=extra).save
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content: bytes = save(plain, metadata=None if metadata is None else dict(metadata))
    return content


def save_tensors(
    path: Path | str, tensors: Mapping[str, Tensor], *, extra: str, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file."""
    path = Path(path)
    content = tensor_bytes(tensors, extra=extra, metadata=metadata)
    remove_leftovers(path.parent, of=path.name)
    write_whole(path, content)


def load_tensors(path: Path, *, extra: str, hint: str) -> dict[str, Tensor]:
    """Read every tensor of a file."""
    load: Any = import_extra("safetensors.torch", extra=extra).load_file
    try:
        found: dict[str, Tensor] = load(path)
    except file_errors(extra) as error:
        raise BadInput(f"{path} cannot be read: {first_line(error)}", hint=hint) from error
    return found


@contextmanager
def open_tensors(
    path: Path | str, *, extra: str, hint: str | None = None, framework: Literal["pt", "np"] = "pt"
) -> Iterator[tuple[Any, dict[str, str]]]:
    """Open a file, memory-mapped: (file, metadata)."""
    safetensors: Any = import_extra("safetensors", extra=extra)
    try:
        with safetensors.safe_open(path, framework=framework) as file:
            yield file, file.metadata() or {}
    except file_errors(extra) as error:
        raise BadInput(f"{path} cannot be read: {first_line(error)}", hint=hint) from error


def file_errors(extra: str) -> tuple[type[Exception], ...]:
    """Return what reading and writing a safetensors file may raise."""
    return OSError, import_extra("safetensors", extra=extra).SafetensorError
