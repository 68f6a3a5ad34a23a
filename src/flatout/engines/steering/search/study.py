"""The study behind a search: Optuna's storage, whose trials are whose, and what makes a study the same study.

A journal file is the default: it serves several processes on one machine or a shared folder.  Many nodes take
PostgreSQL (`postgresql://...`) or Optuna's gRPC proxy (`grpc://host:port`).  SQLite locks under parallel work
and is refused.

Trials are asked in *brackets*, which are halved together.  Each trial carries its worker and bracket, and the
sampler is seeded by both: a search that was killed runs its open brackets again over the rows that are kept,
comes to the same decisions, and tells only what had not been told.

A study belongs to a model, vectors, questions and a way to score.  Resuming it with others is refused: rows
of another model would look like results.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flatout.engines.steering.search.finished_rows import RowLog
from flatout.engines.steering.search.space import Space, Trial, trial_of
from flatout.errors import BadInput, import_extra

if TYPE_CHECKING:
    import optuna

WORKER, BRACKET, REASON, RECIPE = "worker", "bracket", "reason", "recipe:"
LOCK_SUFFIX = ".lock"
STALE_LOCK_S = 10  # a line of the journal takes milliseconds: a lock this old is a dead worker's
STARTUP_TRIALS = 16  # drawn at random before the sampler trusts what it has seen


def open_study(
    where: str | Path,
    *,
    name: str = "steering",
    seed: int = 0,
    worker: str = "0",
    alone: bool = True,
    rows: Path | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
) -> SearchStudy:
    """Open or begin a study in a journal file, or at a URL; `rows` is where finished rows are kept.

    `alone` says that no other worker is at work: what others have left open is then taken over.
    """
    optuna = import_extra("optuna", extra="steering")
    if rows is None and _is_url(where):
        raise BadInput(
            f"a study at {urlsplit(str(where)).scheme}:// has no folder for its rows", hint="give rows=folder"
        )
    folder = rows if rows is not None else Path(where).with_suffix(".rows")
    storage = storage_at(where)
    with _quietly(optuna):
        study = optuna.create_study(
            storage=storage, study_name=name, direction="maximize", load_if_exists=True
        )
    log = RowLog(folder, worker=worker)
    return SearchStudy(study, log, seed=seed, worker=worker, alone=alone, sampler=sampler)


def storage_at(where: str | Path) -> optuna.storages.BaseStorage:
    """The storage of a journal file's path or of a URL."""
    storages: Any = import_extra("optuna.storages", extra="steering")
    if not _is_url(where):
        path = Path(where)
        path.parent.mkdir(parents=True, exist_ok=True)
        journal: Any = import_extra("optuna.storages.journal", extra="steering")
        lock = _lock_of(path, journal)
        _cut_torn_tail(path, lock)
        held: optuna.storages.BaseStorage = storages.JournalStorage(
            journal.JournalFileBackend(str(path), lock_obj=lock)
        )
        return held
    url = urlsplit(str(where))
    if url.scheme == "grpc":
        return _proxy(url.hostname or "localhost", url.port or 13000)
    if url.scheme.startswith("postgresql"):
        try:
            database: optuna.storages.BaseStorage = storages.RDBStorage(str(where))
        except ImportError as error:
            raise BadInput(
                f"a study at {url.scheme}:// needs a driver: {error}", hint="pip install psycopg2-binary"
            ) from error
        return database
    raise BadInput(
        f"a study at {url.scheme}://",
        hint="give the path of a journal file, postgresql://... or grpc://host:port"
        + ("; SQLite locks under parallel work" if url.scheme == "sqlite" else ""),
    )


def _proxy(host: str, port: int) -> optuna.storages.BaseStorage:
    import_extra("grpc", extra="steering")
    storages: Any = import_extra("optuna.storages", extra="steering")
    ignored = import_extra("optuna.exceptions", extra="steering").ExperimentalWarning
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ignored)
        proxy: optuna.storages.BaseStorage = storages.GrpcStorageProxy(host=host, port=port)
    return proxy


class SearchStudy:
    """A study as one worker sees it."""

    def __init__(
        self,
        study: optuna.Study,
        rows: RowLog,
        *,
        seed: int,
        worker: str,
        alone: bool,
        sampler: optuna.samplers.BaseSampler | None = None,
    ) -> None:
        self.study, self.rows, self.seed = study, rows, seed
        self._worker, self._alone, self._sampler = worker, alone, sampler
        self._states: Any = import_extra("optuna.trial", extra="steering").TrialState

    def bind(self, recipe: Mapping[str, str]) -> None:
        """Say what the study is about, or refuse a study that is about something else."""
        held = self.study.user_attrs
        for part, value in recipe.items():
            known = held.get(RECIPE + part)
            if known is None:
                self.study.set_user_attr(RECIPE + part, value)
            elif known != value:
                raise BadInput(
                    f"the study {self.study.study_name!r} was begun with another {part}",
                    hint="resume with the same, or begin a study under another name",
                )

    def num_asked(self) -> int:
        """Trials of all workers that have a configuration."""
        return sum(trial_of(one.number, one.params) is not None for one in self._trials())

    def open_brackets(self) -> list[list[Trial]]:
        """Every bracket of ours with a trial that has not ended, whole; what was never begun is failed."""
        mine: dict[tuple[str, int], list[optuna.trial.FrozenTrial]] = defaultdict(list)
        for one in self._trials():
            worker, bracket = one.user_attrs.get(WORKER), one.user_attrs.get(BRACKET)
            if not self._alone and worker != self._worker:
                continue
            if trial_of(one.number, one.params) is None or worker is None or bracket is None:
                self._fail_unfinished(one, "ended before it had a configuration")
            else:
                mine[worker, bracket].append(one)
        return [
            [trial for one in held if (trial := trial_of(one.number, one.params)) is not None]
            for _, held in sorted(mine.items())
            if any(not one.state.is_finished() for one in held)
        ]

    def ask(self, space: Space, count: int) -> list[Trial]:
        """A bracket of `count` trials; the sampler takes those that run for bad ones, so that they differ."""
        bracket = 1 + max(
            (one.user_attrs.get(BRACKET, -1) for one in self._trials() if self._is_mine(one)), default=-1
        )
        self.study.sampler = self._sampler or self._seeded(bracket)
        asked = []
        for _ in range(count):
            one = self.study.ask()
            one.set_user_attr(WORKER, self._worker)
            one.set_user_attr(BRACKET, bracket)
            asked.append(space.suggest(one))
        return asked

    def report(self, number: int, *, value: float, num_questions: int) -> None:
        """An intermediate mean; Optuna keeps the first of a step."""
        held = self._trial(number)
        if not held.state.is_finished() and num_questions not in held.intermediate_values:
            optuna = import_extra("optuna", extra="steering")
            optuna.trial.Trial(self.study, held._trial_id).report(value, num_questions)

    def complete(self, number: int, value: float) -> None:
        """A trial has answered every question."""
        if not self._trial(number).state.is_finished():
            self.study.tell(number, value)

    def prune(self, number: int) -> None:
        """A trial was not good enough to go on; Optuna keeps its last intermediate mean."""
        if not self._trial(number).state.is_finished():
            self.study.tell(number, state=self._states.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """A trial gave no number: it has no value, which is not the value 0."""
        self._fail_unfinished(self._trial(number), reason)

    def best(self) -> tuple[Trial, float] | None:
        """The complete trial with the highest mean; the earlier of equals."""
        found: tuple[Trial, float] | None = None
        for one in self._trials():
            trial = trial_of(one.number, one.params)
            if one.state == self._states.COMPLETE and trial is not None and one.value is not None:
                found = (trial, one.value) if found is None or one.value > found[1] else found
        return found

    def counts(self) -> dict[str, int]:
        """Trials by state: complete, pruned, failed, running."""
        states = [one.state for one in self._trials()]
        names = {
            "complete": self._states.COMPLETE,
            "pruned": self._states.PRUNED,
            "failed": self._states.FAIL,
            "running": self._states.RUNNING,
        }
        return {name: states.count(state) for name, state in names.items()}

    def _fail_unfinished(self, one: optuna.trial.FrozenTrial, reason: str) -> None:
        if not one.state.is_finished():
            optuna = import_extra("optuna", extra="steering")
            optuna.trial.Trial(self.study, one._trial_id).set_user_attr(REASON, reason)
            self.study.tell(one.number, state=self._states.FAIL)

    def _seeded(self, bracket: int) -> optuna.samplers.BaseSampler:
        """TPE, seeded for the bracket: after a restart it must not draw the first one again."""
        digest = hashlib.sha256(f"{self.seed}:{self._worker}:{bracket}".encode()).digest()
        samplers: Any = import_extra("optuna.samplers", extra="steering")
        made: optuna.samplers.BaseSampler = samplers.TPESampler(
            seed=int.from_bytes(digest[:4], "big"),
            n_startup_trials=STARTUP_TRIALS,
            constant_liar=True,
            multivariate=True,
        )
        return made

    def _is_mine(self, one: optuna.trial.FrozenTrial) -> bool:
        return bool(one.user_attrs.get(WORKER) == self._worker)

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _trial(self, number: int) -> optuna.trial.FrozenTrial:
        return self._trials()[number]


def _is_url(where: str | Path) -> bool:
    return isinstance(where, str) and "://" in where


def _lock_of(path: Path, journal: Any) -> Any:
    """Optuna's lock of a journal: a link to it, through which it asks how old the lock is.

    A link that leads nowhere cannot be asked, and a worker that died with it would be waited for for ever: so
    it names the file beside it, wherever the folder is moved to or mounted.
    """
    lock = journal.JournalFileSymlinkLock(str(path), grace_period=STALE_LOCK_S)
    lock._lock_target_file = path.name
    link = Path(f"{path}{LOCK_SUFFIX}")
    if link.is_symlink() and not link.exists() and path.exists():
        link.unlink(missing_ok=True)
    return lock


def _cut_torn_tail(path: Path, lock: Any) -> None:
    """Drop a line that a dead process has begun: Optuna would append to it and never read past it again."""
    if not _is_torn(path):
        return
    lock.acquire()
    try:
        if _is_torn(path):
            with open(path, "r+b") as file:
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
    finally:
        lock.release()


def _is_torn(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


@contextmanager
def _quietly(optuna: Any) -> Iterator[None]:
    """Keep Optuna's greeting off stderr, and leave the user's choice as it was."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
