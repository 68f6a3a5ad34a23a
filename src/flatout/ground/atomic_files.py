"""Atomic files: each is complete or does not exist.

A file is written under a temporary name, flushed to the disk and renamed, so a kill or a full disk in the
middle leaves a leftover that nobody reads.  The writer locks its temporary file.  The kernel releases that
lock when the process dies, however it dies: a lock cannot go stale, and any process may remove a leftover
without a lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import stat
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
    handle = _create_locked(partial)
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
        with contextlib.suppress(OSError):  # a partial line has no line end, so nobody reads it
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
    """Lock a file while it is open; False if another process holds the lock, None if that is unknown.

    The system releases the lock when the process dies, however it dies: a held lock says that its holder
    lives.
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

    `replace` removes an existing one when the new one is complete.  One process at a time writes below
    `final.parent`: leftovers of a dead one are removed first.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for leftover in final.parent.glob(f".*{PARTIAL}"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
    partial = final.with_name(f".{final.name}{PARTIAL}")
    partial.mkdir()
    try:
        yield partial
        give_plain_modes(partial)
        for path in (*partial.iterdir(), partial):
            flush(path)
        if replace and final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    except BaseException:  # a leftover would fill a full disk further
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush(final.parent)


def give_plain_modes(folder: Path) -> None:
    """Give the files in a folder the mode of a new file (the umask's).

    A library that writes atomically, as safetensors does, leaves the mode of its temporary file: 0600.
    """
    plain = folder / f".{uuid.uuid4().hex}{PARTIAL}"
    plain.touch()
    mode = stat.S_IMODE(plain.stat().st_mode)
    plain.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def remove_leftovers(folder: Path, *, of: str = "") -> list[str]:
    """Remove leftovers of dead writers of files named like `of`; a live writer holds its file's lock."""
    removed = []
    for path in folder.glob(f".{glob.escape(of)}*{PARTIAL}"):
        # An OSError: it was renamed or removed since it was listed, or it is another user's.
        with contextlib.suppress(OSError), path.open("r+b") as file:
            if try_lock(file):
                path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed


def _create_locked(partial: Path) -> int:
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
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
