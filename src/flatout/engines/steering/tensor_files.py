"""safetensors files that say what they are: written whole or not at all, refused in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from flatout.engines.run.models import first_line
from flatout.ground.atomic_files import remove_leftovers, write_whole
from flatout.ground.errors import BadInput, import_extra


def tensor_bytes(tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> bytes:
    """Return the content of a safetensors file."""
    save: Any = import_extra("safetensors.torch", extra="steering").save
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content: bytes = save(plain, metadata=dict(metadata))
    return content


def save_tensors(path: Path | str, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    path = Path(path)
    content = tensor_bytes(tensors, metadata=metadata)
    remove_leftovers(path.parent, of=path.name)
    write_whole(path, content)


@contextmanager
def open_tensors(path: Path | str, *, hint: str | None = None) -> Iterator[tuple[Any, dict[str, str]]]:
    """Open a safetensors file, memory-mapped: (file, metadata)."""
    safetensors: Any = import_extra("safetensors", extra="steering")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file, file.metadata() or {}
    except (OSError, safetensors.SafetensorError) as error:
        raise BadInput(f"{path} cannot be read: {first_line(error)}", hint=hint) from error
