"""Files that are there with all of their content or not there at all.

A file is written under a temporary name, handed to the disk and renamed, so a kill or a full disk in the
middle leaves a leftover that nobody reads.  The writer locks its temporary file.  The kernel holds that lock
and lets go of it when the process dies, however it dies: a lock cannot go stale, and whoever finds a leftover
without one may remove it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import IO, Any

from flatout.ground.errors import BadInput
from flatout.ground.units import show_bytes

PARTIAL = ".partial"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSED = FULL | {errno.EROFS}  # by the disk, whoever writes
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def write_whole(final: Path, content: bytes) -> None:
    """Write a file, and its folder; raise BadInput if the system refuses, and leave nothing behind."""
    try:
        replace_whole(final, content)
    except OSError as error:
        raise unwritable(str(final), error, size=show_bytes(len(content))) from error


def replace_whole(final: Path, content: bytes) -> None:
    """Write a file, and its folder, so that it survives a loss of power; raise OSError if that fails."""
    partial = final.with_name(f".{final.name}-{uuid.uuid4().hex}{PARTIAL}")
    final.parent.mkdir(parents=True, exist_ok=True)
    handle = _locked(partial)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
        partial.rename(final)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    flush(final.parent)


def open_to_append(path: Path) -> FileIO:
    """Open a file to append to, unbuffered: closing it does not try to write again what failed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)
    except OSError as error:
        raise unwritable(str(path), error) from error


def append_whole(file: FileIO, content: bytes, *, when_full: str) -> None:
    """Append to a file opened unbuffered; on a full disk, undo a partial write."""
    before = file.tell()
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        with contextlib.suppress(OSError):  # what cannot be taken back has no line end: nobody reads it
            file.truncate(before)
        raise unwritable(str(file.name), error, when_full=when_full) from error


def cut_torn_line(path: Path) -> int:
    """Remove what a killed writer left behind the last line end of a file; return the bytes that stay."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return whole


def unwritable(
    name: str,
    error: OSError,
    *,
    size: str | None = None,
    when_full: str = "free some space or choose another folder",
) -> BadInput:
    """Make the error for a file, or a folder's files, that the system does not write."""
    return BadInput(
        f"{name} cannot be written{f' ({size})' if size else ''}: {error.strerror or error}",
        hint=when_full if error.errno in FULL else "choose another folder",
    )


def refused_by_disk(error: BaseException | None) -> OSError | None:
    """Find a full or read-only disk among the causes of an error: a library may raise its own over it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in REFUSED:
            return error
        error = error.__cause__ or error.__context__
    return None


def try_lock(file: IO[Any], *, shared: bool = False) -> bool | None:
    """Take a file's lock for as long as it is open; False if another process has it, None if that is unknown.

    The system lets go of it when the process dies, however it dies: a lock that is held says that its
    holder lives.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


@contextlib.contextmanager
def whole_folder(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a folder to fill; it is renamed to `final` when the block ends, so it is whole or not there.

    `replace` removes one that is there, when the new one is complete.  One process writes below
    `final.parent`: what a dead one left behind there is removed first.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for leftover in final.parent.glob(f".*{PARTIAL}"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
    partial = final.with_name(f".{final.name}{PARTIAL}")
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            flush(path)
        if replace and final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    except BaseException:  # what is left of it would fill a full disk further
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush(final.parent)


def remove_leftovers(folder: Path, *, of: str = "") -> list[str]:
    """Remove what dead writers of files named like `of` left behind; a live one holds its file's lock."""
    removed = []
    for path in folder.glob(f".{glob.escape(of)}*{PARTIAL}"):
        # Renamed or removed since it was listed, or another user's; where it has no lock, its writer is dead.
        with contextlib.suppress(OSError), path.open("r+b") as file:
            if try_lock(file):
                path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed


def _locked(partial: Path) -> int:
    """Create a file and hold its lock; try again if a cleaner removed it in between."""
    while True:
        handle = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(handle)
                raise
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)


def flush(path: Path) -> None:
    """Hand a file, or the names of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
