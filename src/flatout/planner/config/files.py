"""Several files changed as one: all of them, or none.

Every file is written beside itself under a temporary name and flushed to the disk; only when all are there
are they renamed, one after the other.  A rename that fails puts back those that went before it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from flatout.errors import BadInput


def check_writable(path: Path) -> None:
    """BadInput for a file that must not, or cannot, be replaced."""
    if path.is_symlink():
        raise BadInput(
            f"{path} is a symbolic link to {os.readlink(path)}",
            hint="nothing was written; name the file itself",
        )
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise BadInput(f"{path} is not there any more", hint="nothing was written") from None
    if not stat.S_ISREG(mode):
        raise BadInput(f"{path} is not a plain file", hint="nothing was written")
    # The superuser may write everything, but a file without any permission to write was meant to stay.
    if not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) or not os.access(path, os.W_OK):
        allow = f"chmod u+w {shlex.quote(str(path))}"
        raise BadInput(f"{path} is read-only", hint=f"nothing was written; allow it with {allow}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise BadInput(f"the folder {path.parent} is read-only", hint="nothing was written")


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Give every file its content; after an error each has the one it had before."""
    before = {path: path.read_bytes() if path.exists() else None for path in contents}
    temporaries: dict[Path, Path] = {}
    try:
        with _explained():
            for path, content in contents.items():
                temporaries[path] = _temporary_beside(path)
                _fill(temporaries[path], content, like=path)
            _rename_all(temporaries, before)
    finally:
        for temporary in temporaries.values():
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()


def write_file(path: Path, content: bytes) -> None:
    """Write one file that is not there yet, flushed to the disk."""
    with _explained(), path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = error.filename or "a file beside the config"  # a write that fails knows no name
        raise BadInput(f"could not write {name}: {error.strerror}", hint="no config was changed") from error


def _temporary_beside(path: Path) -> Path:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    return Path(name)


def _fill(temporary: Path, content: bytes, *, like: Path) -> None:
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if like.exists():
        found = like.stat()
        temporary.chmod(stat.S_IMODE(found.st_mode))
        with contextlib.suppress(PermissionError):  # only the superuser may give files away
            os.chown(temporary, found.st_uid, found.st_gid)
    else:
        temporary.chmod(0o644)


def _rename_all(temporaries: Mapping[Path, Path], before: Mapping[Path, bytes | None]) -> None:
    renamed: list[Path] = []
    try:
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
            renamed.append(path)
        for folder in {path.parent for path in temporaries}:
            _flush_folder(folder)
    except BaseException:
        for path in renamed:
            _put_back(path, before[path])
        raise


def _put_back(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
        return
    temporary = _temporary_beside(path)
    _fill(temporary, content, like=path)
    os.replace(temporary, path)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
