"""Where Optuna keeps a study: a journal file, PostgreSQL, or Optuna's gRPC proxy.

A journal file is the default: it serves several processes on one machine or a shared folder.  Many nodes take
PostgreSQL (`postgresql://...`) or the proxy (`grpc://host:port`).  SQLite locks under parallel work and is
refused.

A server can be restarted, and a network can stall, in the middle of a search: what fails for that reason is
asked again until the server is back.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flatout.ground.atomic_files import cut_torn_line, refused_by_disk, unwritable
from flatout.ground.errors import BadInput, import_extra

if TYPE_CHECKING:
    import optuna

LOCK_SUFFIX = ".lock"
SYNC_S = 1.0
PATIENCE_S = 1800.0  # with a server that was there and is away
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between two questions to it
# Of libpq: a server that vanished without a word is noticed after a minute.
LIBPQ = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
STALE_LOCK_S = 10  # a line of the journal takes milliseconds: a lock this old is a dead worker's


def open_storage(where: str | Path) -> optuna.storages.BaseStorage:
    """Open the storage of a journal file's path or of a URL."""
    storages: Any = import_extra("optuna.storages", extra="steering")
    found: optuna.storages.BaseStorage
    if not _is_url(where):
        path = Path(where)
        path.parent.mkdir(parents=True, exist_ok=True)
        journal: Any = import_extra("optuna.storages.journal", extra="steering")
        lock = _make_lock(path, journal)
        _cut_torn_tail(path, lock)
        backend = journal.JournalFileBackend(str(path), lock_obj=lock)
        found = storages.JournalStorage(JournalFile(path, backend, lock))
        return found
    url = urlsplit(str(where))
    if url.scheme == "grpc":
        import_extra("grpc", extra="steering")
        ignored = import_extra("optuna.exceptions", extra="steering").ExperimentalWarning
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ignored)
            found = storages.GrpcStorageProxy(host=url.hostname or "localhost", port=url.port or 13000)
        return PatientStorage(found)  # type: ignore[return-value]
    if url.scheme.startswith("postgresql"):
        options: dict[str, Any] = {"pool_pre_ping": True}
        if url.scheme.partition("+")[2] in ("", "psycopg", "psycopg2"):
            options["connect_args"] = LIBPQ
        try:
            found = storages.RDBStorage(_name_driver(str(where)), engine_kwargs=options)
        except ImportError as error:
            raise BadInput(
                f"a study at {url.scheme}:// needs a driver: {error}",
                hint="pip install 'flatout[postgresql]'",
            ) from error
        return PatientStorage(storages.get_storage(found))  # type: ignore[return-value]
    raise BadInput(
        f"a study cannot be stored at {url.scheme}://",
        hint="give the path of a journal file, postgresql://... or grpc://host:port"
        + ("; SQLite locks under parallel work" if url.scheme == "sqlite" else ""),
    )


class PatientStorage:
    """A storage on a server: requests that fail while the server is away are repeated until it is back.

    Nothing is repeated before the first answer.  A request that failed may have been carried out, and only
    its answer lost: attributes, values and parameters are then written again unchanged; a finished trial
    stays finished; and if a trial was begun twice, the second has an owner, and the first fails when the
    search ends.
    """

    def __init__(self, storage: Any) -> None:
        self._storage, self._has_answered = storage, False

    def __getattr__(self, name: str) -> Any:
        if name == "_storage":  # of a copy that is being made
            raise AttributeError(name)
        found = getattr(self._storage, name)
        return functools.partial(self._ask, found) if callable(found) else found

    def _ask(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        optuna: Any = import_extra("optuna", extra="steering")
        began_s, pause_s = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                answer = method(*arguments, **options)
                self._has_answered = True
                return answer
            except optuna.exceptions.UpdateFinishedTrialError:
                if pause_s == FIRST_PAUSE_S:
                    raise
                return True
            except _storage_errors(optuna) as error:
                is_over = not self._has_answered or time.monotonic() - began_s > PATIENCE_S
                if is_over or not _is_away(error):
                    raise
                reason = " ".join(str(error.__cause__ or error).split())[:120]
            if pause_s == FIRST_PAUSE_S:
                words = f"the study's storage is away ({reason}); waiting up to {PATIENCE_S:.0f} s for it"
                warnings.warn(words, RuntimeWarning, stacklevel=3)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _name_driver(url: str) -> str:
    """Name the driver that is installed: which one an address without a name means depends on SQLAlchemy."""
    for driver in ("psycopg", "psycopg2"):
        if url.startswith("postgresql://") and importlib.util.find_spec(driver):
            return url.replace("postgresql", f"postgresql+{driver}", 1)
    return url


def _is_away(error: BaseException | None) -> bool:
    """Return whether a server could not be reached, as opposed to refusing a request."""
    while error is not None:
        if type(error).__name__ in ("OperationalError", "InterfaceError"):
            return True
        if getattr(error, "connection_invalidated", False):
            return True
        code = getattr(error, "code", None)  # of gRPC
        if callable(code) and code().name in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            return True
        error = error.__cause__
    return False


class JournalFile:
    """Optuna's journal file, pushed to the disk once a second.

    Optuna's own backend waits for the disk with every parameter of a trial, a dozen times for each: longer
    than a small model takes to answer a trial's questions.  What is written here outlives the process,
    however that ends; a loss of power may cost the last second, as it may of the finished rows.
    """

    def __init__(self, path: Path, backend: Any, lock: Any) -> None:
        self._path, self._backend, self._lock = path, backend, lock
        self._synced_s = -math.inf

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Read as Optuna does."""
        found: Iterator[dict[str, Any]] = self._backend.read_logs(log_number_from)
        return found

    def append_logs(self, logs: Sequence[Mapping[str, Any]]) -> None:
        """Append lines under Optuna's lock."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        self._lock.acquire()
        try:
            with open(self._path, "ab") as file:
                file.write(lines.encode())
                file.flush()
                if time.monotonic() - self._synced_s >= SYNC_S:
                    os.fsync(file.fileno())
                    self._synced_s = time.monotonic()
        finally:
            self._lock.release()


def create_study(where: str | Path, *, name: str) -> optuna.Study:
    """Open or begin a study; raise BadInput if its storage cannot be reached."""
    package: Any = import_extra("optuna", extra="steering")
    try:
        storage = open_storage(where)
        with _quietly(package):
            study: optuna.Study = package.create_study(
                storage=storage, study_name=name, direction="maximize", load_if_exists=True
            )
        return study
    except _storage_errors(package) as error:
        shown = hide_password(str(where))
        if refused := refused_by_disk(error):
            raise unwritable(shown, refused) from None
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadInput(
            f"the storage {shown} cannot be reached: {reason}",
            hint="check the address and that it runs, or omit --storage for a journal file",
        ) from None


def _is_url(where: str | Path) -> bool:
    return isinstance(where, str) and "://" in where


def hide_password(url: str) -> str:
    """Write a storage's address as it may be shown."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:...@", url)


def _storage_errors(optuna: Any) -> tuple[type[Exception], ...]:
    """Return what storages raise when they are not there; their packages are imported only if used."""
    found: list[type[Exception]] = [OSError, optuna.exceptions.StorageInternalError]
    for module, name in (("sqlalchemy.exc", "SQLAlchemyError"), ("grpc", "RpcError")):
        if module.split(".")[0] in sys.modules:
            found.append(getattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name))
    return tuple(found)


def _make_lock(path: Path, journal: Any) -> Any:
    """Make Optuna's lock of a journal: a link to it, through which it asks how old the lock is.

    A dangling link has no age, so the lock of a dead worker would block the others for ever.  Therefore the
    link names the journal by its file name alone, which stays valid wherever the folder is moved or mounted.
    """
    lock = journal.JournalFileSymlinkLock(str(path), grace_period=STALE_LOCK_S)
    lock._lock_target_file = path.name
    link = Path(f"{path}{LOCK_SUFFIX}")
    if link.is_symlink() and not link.exists() and path.exists():
        link.unlink(missing_ok=True)
    return lock


def _cut_torn_tail(path: Path, lock: Any) -> None:
    """Drop a line that a dead process has begun: Optuna would append to it and never read past it again."""
    if not path.is_file() or path.read_bytes()[-1:] in (b"", b"\n"):
        return
    lock.acquire()
    try:
        cut_torn_line(path)
    finally:
        lock.release()


@contextmanager
def _quietly(optuna: Any) -> Iterator[None]:
    """Keep Optuna's greeting off stderr, and leave the user's choice as it was."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
