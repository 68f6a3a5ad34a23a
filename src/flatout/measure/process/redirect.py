"""Send a script's writes to a scratch folder while a tuning runs it.

A script saves checkpoints and logs where it always does; a trial must not overwrite those.  Files that Python
or torch opens for writing are created in the scratch folder under the same path, and later reads find them
there.  A file that is opened for update or append is copied there first.  A folder that the script removes
with everything in it stays, and is hidden from the script.  Files in the system's temporary folder, caches of
compiled code, and anything that is not a file (a terminal, a pipe), stay as they are.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flatout.measure.patches import Patches

WRITING = set("wax+")
CLOCK_TICK_NS = 2_000_000_000  # file systems note when a folder changed to within two seconds


def redirect_writes(patches: Patches, scratch: Path, *, apart: Sequence[Path] = ()) -> Mirror:
    """Send writes of this process and its forked children to `scratch`, except those in `apart`."""
    mirror = Mirror(scratch, apart)
    real_open, real_os_open, real_mkdir = builtins.open, os.open, os.mkdir

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, bytes, os.PathLike)):
            file = mirror.for_writing(file, keep="w" not in mode) if WRITING & set(mode) else mirror.now(file)
        return real_open(file, mode, *args, **kwargs)

    def os_opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if kwargs.get("dir_fd") is None:
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            path = mirror.for_writing(path, keep=not flags & os.O_TRUNC) if writes else mirror.now(path)
        return real_os_open(path, flags, *args, **kwargs)

    def made(path: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("dir_fd") is None:
            if os.path.lexists(mirror.now(path)):
                raise FileExistsError(17, "File exists", path)
            path = mirror.for_writing(path, keep=False)
            make_parent(path)
        real_mkdir(path, *args, **kwargs)

    def make_parent(path: Any) -> None:
        """Make a folder on the disk that the script made in the scratch folder, if it holds free ones."""
        parent = os.path.dirname(os.path.abspath(os.fsdecode(path)))
        if not _exists(parent) and os.path.isdir(parent):
            make_parent(parent)
            real_mkdir(parent)

    patches.replace(builtins, "open", opened)
    patches.replace(io, "open", opened)
    patches.replace(os, "open", os_opened)
    patches.replace(os, "mkdir", made)
    for owner, name in ((os, "rename"), (os, "replace")):
        patches.replace(owner, name, _both(getattr(owner, name), mirror))
    for owner, name in ((os, "remove"), (os, "unlink"), (os, "rmdir")):
        patches.replace(owner, name, _only_ours(getattr(owner, name), mirror))
    _redirect_others(patches, mirror)
    patches.replace(shutil, "rmtree", _whole_folder(shutil.rmtree, mirror))
    return mirror


def _redirect_others(patches: Patches, mirror: Mirror) -> None:
    """Redirect what changes, links, reads or lists files without opening them."""
    for name in ("chmod", "chown", "utime", "truncate", "setxattr"):
        if hasattr(os, name):
            patches.replace(os, name, _changing(getattr(os, name), mirror))
    for name in ("symlink", "link"):
        patches.replace(os, name, _linking(getattr(os, name), mirror))
    names = ("stat", "lstat", "access", "readlink", "getxattr", "listxattr")
    for name in (name for name in names if hasattr(os, name)):
        patches.replace(os, name, _reading(getattr(os, name), mirror))
    patches.replace(os, "listdir", _listing(os.listdir, mirror))
    patches.replace(os, "scandir", _scanning(os.scandir, mirror))


def redirect_torch(patches: Patches, mirror: Mirror) -> None:
    """Redirect archives of torch and safetensors, which bypass Python's `open`."""
    import torch

    real_save = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)):
            f = mirror.for_writing(f, keep=False)
        return real_save(obj, f, *args, **kwargs)

    patches.replace(torch, "save", save)
    try:
        safetensors: Any = importlib.import_module("safetensors.torch")
    except ImportError:
        return
    real_serialize = safetensors.serialize_file

    def serialize(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return real_serialize(tensors, mirror.for_writing(filename, keep=False), *args, **kwargs)

    patches.replace(safetensors, "serialize_file", serialize)


def _both(real: Callable[..., Any], mirror: Mirror) -> Callable[..., Any]:
    def moved(source: Any, target: Any, **kwargs: Any) -> Any:
        return real(mirror.for_writing(source, keep=True), mirror.for_writing(target, keep=False), **kwargs)

    return moved


def _only_ours(real: Callable[..., Any], mirror: Mirror) -> Callable[..., Any]:
    def removed(path: Any, *, dir_fd: int | None = None) -> Any:
        if dir_fd is not None:  # as shutil.rmtree does: a name in a folder that is open
            folder = os.path.realpath(f"/proc/self/fd/{dir_fd}")
            if not os.path.isdir(folder):
                return real(path, dir_fd=dir_fd)
            path = os.path.join(folder, os.fsdecode(path))
        return real(path) if mirror.is_free(path) else real(mirror.for_writing(path, keep=True))

    return removed


def _whole_folder(real: Callable[..., Any], mirror: Mirror) -> Callable[..., Any]:
    def removed(path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None or not isinstance(path, (str, bytes, os.PathLike)):
            return real(path, *args, **kwargs)
        there, is_folder = mirror.now(path), os.path.isdir(path)
        if mirror.is_free(path) or not is_folder:
            return real(there, *args, **kwargs)
        return real(mirror.hide(path), ignore_errors=True)

    return removed


def _reading(real: Callable[..., Any], mirror: Mirror) -> Callable[..., Any]:
    def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(path, (str, bytes, os.PathLike)) and kwargs.get("dir_fd") is None
        if is_path and not mirror.resolves:
            path = mirror.now(path)
        return real(path, *args, **kwargs)

    return read


def _changing(real: Callable[..., Any], mirror: Mirror) -> Callable[..., Any]:
    def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, bytes, os.PathLike)) and kwargs.get("dir_fd") is None:
            path = mirror.for_writing(path, keep=True)
        return real(path, *args, **kwargs)

    return changed


def _linking(real: Callable[..., Any], mirror: Mirror) -> Callable[..., Any]:
    def linked(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        there = mirror.for_writing(target, keep=False)
        if there is not target:  # a relative source is relative to the folder of the link
            beside = os.path.dirname(os.path.abspath(os.fsdecode(target))) if real is _symlink else ""
            source, target = mirror.now(os.path.join(beside, os.fsdecode(source))), there
        return real(source, target, *args, **kwargs)

    return linked


def _listing(real: Callable[..., Any], mirror: Mirror) -> Callable[..., Any]:
    def listed(path: Any = ".") -> Any:
        return list(dict.fromkeys(name for folder in mirror.folders(path) for name in real(folder)))

    return listed


def _scanning(real: Callable[..., Any], mirror: Mirror) -> Callable[..., Any]:
    def scanned(path: Any = ".") -> Any:
        folders = mirror.folders(path)
        return real(folders[0]) if len(folders) == 1 else _Entries([real(folder) for folder in folders])

    return scanned


class _Entries:
    """Merges the entries of several folders; of two with one name, the first counts."""

    def __init__(self, scans: list[Any]) -> None:
        self._scans, self._seen = scans, set[str]()
        self._entries = (entry for scan in scans for entry in scan)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        entry = next(each for each in self._entries if each.name not in self._seen)
        self._seen.add(entry.name)
        return entry

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for scan in self._scans:
            scan.close()


def compiled_code() -> Iterator[str]:
    """Return the folders in which Triton, inductor and torch's extensions keep what they compile.

    The system's linker loads it from there, and knows nothing of a scratch folder.
    """
    home, variables = os.path.expanduser("~"), os.environ
    user_cache = variables.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    yield os.path.join(variables.get("TRITON_HOME") or home, ".triton")
    yield variables.get("TORCH_EXTENSIONS_DIR") or os.path.join(user_cache, "torch_extensions")
    yield from (
        variables[each] for each in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR") if variables.get(each)
    )


class Mirror:
    """Maps paths to the scratch folder."""

    def __init__(self, scratch: Path, apart: Sequence[Path] = ()) -> None:
        self._scratch = os.path.realpath(scratch)
        self._apart = tuple(
            os.path.join(os.path.realpath(folder), "")
            for folder in (scratch, *apart, *map(Path, compiled_code()))
        )
        temporary = os.path.realpath(tempfile.gettempdir())
        self._free = tuple(
            os.path.join(os.path.realpath(folder), "") for folder in (temporary, "/dev", "/proc")
        )
        here = os.path.join(os.getcwd(), "")  # a job may live in the temporary folder itself
        self._here = here if here.startswith(os.path.join(temporary, "")) else None
        self._thread = threading.local()
        self._hidden: set[str] = set()  # folders that the script removed
        self._is_used = False  # whether anything was written or hidden
        self._empty_since_ns = -1

    @property
    def resolves(self) -> bool:
        """Whether this thread resolves a path, with calls that must see the real disk."""
        return getattr(self._thread, "resolves", False)

    def _whole(self, path: Any) -> str:
        """Return a path without links."""
        self._thread.resolves = True
        try:
            return os.path.realpath(os.fsdecode(path))
        finally:
            self._thread.resolves = False

    def is_free(self, path: Any) -> bool:
        """Return whether a path may be written directly."""
        whole = self._whole(path)
        named = os.path.join(whole, "")
        if named.startswith(self._apart):
            return True
        if named.startswith(self._free) and not (self._here and named.startswith(self._here)):
            return True
        try:
            mode = _stat(whole).st_mode
        except OSError:
            return False
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

    def now(self, path: Any) -> Any:
        """Return where to read a path: in the scratch folder if it was written there.

        Many scripts look at files in every step, so this must take little time.
        """
        if not (self._is_used or self._finds_any()):
            return path
        there = self._scratch + self._whole(path)
        if self._hidden and self._is_hidden(path) and not self.is_free(path):
            return there
        if not _exists(there) or self.is_free(path):
            return path
        return path if os.path.isdir(there) and _exists(path) else there

    def _finds_any(self) -> bool:
        """Look into the scratch folder, where another process of the script may have written, too."""
        try:
            changed_ns = _stat(self._scratch).st_mtime_ns
            if changed_ns == self._empty_since_ns:
                return False
            self._is_used = bool(_listdir(self._scratch))
        except OSError:
            return False
        if time.time_ns() - changed_ns > CLOCK_TICK_NS:  # what changes it later shows in its time
            self._empty_since_ns = changed_ns
        return self._is_used

    def folders(self, path: Any) -> list[Any]:
        """Return where a folder's entries are: in the scratch folder, in the user's, or in both."""
        now = self.now(path) if isinstance(path, (str, bytes, os.PathLike)) else path
        there = self._there(path) if now is path and not isinstance(path, (int, bytes)) else None
        return [there, path] if there is not None and os.path.isdir(there) else [now]

    def for_writing(self, path: Any, *, keep: bool) -> Any:
        """Return where to write a path; with `keep`, copy its contents first."""
        there = self._there(path)
        if there is None:
            return path
        if keep and not _exists(there) and not self._is_hidden(path) and os.path.isfile(path):
            os.makedirs(os.path.dirname(there), exist_ok=True)
            shutil.copy2(path, there)
        elif keep and not _exists(there) and os.path.isdir(path):
            os.makedirs(there)
        elif os.path.isdir(os.path.dirname(self._whole(path))):
            os.makedirs(os.path.dirname(there), exist_ok=True)
        return there

    def hide(self, path: Any) -> str:
        """Hide a folder from the script; return where it is in the scratch folder."""
        whole = self._whole(path)
        self._hidden.add(os.path.join(whole, ""))
        self._is_used = True
        return self._scratch + whole

    def _is_hidden(self, path: Any) -> bool:
        whole = os.path.join(self._whole(path), "")
        return whole.startswith(tuple(self._hidden))

    def _there(self, path: Any) -> str | None:
        if self.is_free(path):
            return None
        return self._scratch + self._whole(path)


_stat, _symlink, _listdir = os.stat, os.symlink, os.listdir


def _exists(path: str) -> bool:
    try:
        _stat(path)
    except OSError:
        return False
    return True
