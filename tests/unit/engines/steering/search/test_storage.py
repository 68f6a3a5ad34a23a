"""Where a study may lie, and what is said of a place where it cannot."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from flatout.engines.steering.search import storage
from flatout.engines.steering.search.space import Space
from flatout.engines.steering.search.storage import PatientStorage, create_study, hide_password, open_storage
from flatout.engines.steering.search.study import SearchStudy, open_study
from flatout.ground.errors import BadInput

SPACE = Space(layers=(0, 1), methods=("pca",), strength=(0.0, 1.0), where=("all",))


def opened(folder: Path) -> SearchStudy:
    return open_study(folder / "study.journal", rows=folder / "rows")


def test_the_lock_of_a_dead_worker_is_taken_away_from_a_relative_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage, "STALE_LOCK_S", 3)
    before = opened(Path("run")).ask(SPACE, 2)
    open_storage("run/study.journal")._backend._lock.acquire()  # type: ignore[attr-defined]
    Path("run").rename("moved")
    assert len(opened(Path("moved")).ask(SPACE, 2)) == len(before) == 2
    Path("moved/study.journal.lock").symlink_to("moved/study.journal")  # it leads nowhere
    assert len(opened(Path("moved")).ask(SPACE, 2)) == 2


def test_where_a_study_may_lie(tmp_path: Path) -> None:
    assert opened(tmp_path / "deep").rows.folder == tmp_path / "deep" / "rows"
    assert isinstance(open_storage(tmp_path / "a.journal"), optuna.storages.JournalStorage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proxy = open_storage("grpc://localhost:13001")
    assert isinstance(proxy, PatientStorage)
    assert isinstance(proxy._storage, optuna.storages.GrpcStorageProxy)
    with pytest.raises(BadInput, match=r"sqlite://.*SQLite locks"):
        open_storage("sqlite:///study.db")


def test_a_missing_database_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy")
    with pytest.raises(BadInput, match=r"needs a driver.*flatout\[postgresql\]"):
        open_storage("postgresql+asyncpg://localhost/study")
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: name == "psycopg2")
    assert storage._name_driver("postgresql://me@host/db") == "postgresql+psycopg2://me@host/db"
    assert storage._name_driver("postgresql+pg8000://host/db") == "postgresql+pg8000://host/db"


def test_a_password_is_never_shown() -> None:
    assert hide_password("postgresql://me:secret@host/db") == "postgresql://me:...@host/db"
    assert hide_password("grpc://host:13000") == "grpc://host:13000"


def test_a_storage_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be reached"):
        create_study(tmp_path / "file" / "run" / "study.journal", name="s")


class OperationalError(Exception):
    """As a database driver raises it: the server is away."""


class ShakyStorage(optuna.storages.InMemoryStorage):
    """A server that fails as told: before it has done what it was asked, or with its answer on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[str] = []
        self.after: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("create_new_trial", "set_trial_state_values", "get_all_trials"):
            return found

        def ask(*arguments: Any, **options: Any) -> Any:
            for place, words in ((self.before, "refused"), (self.after, "cut off")):
                if words == "cut off":
                    answer = found(*arguments, **options)
                if name in place:
                    place.remove(name)
                    raise optuna.exceptions.StorageInternalError("commit") from OperationalError(words)
            return answer

        return ask


def test_a_server_that_is_away_is_waited_for_and_nothing_is_done_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    shaky = ShakyStorage()
    shaky.before = ["create_new_trial"]
    patient: Any = PatientStorage(shaky)
    study = optuna.create_study(storage=patient)
    shaky.before = ["create_new_trial"] * 8
    with pytest.warns(RuntimeWarning, match=r"storage is away \(refused\); waiting up to 1800 s"):
        trial = study.ask()
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    shaky.after = ["set_trial_state_values"]
    with pytest.warns(RuntimeWarning, match="cut off"):
        study.tell(trial, 1.0)  # it is asked again, and has been told
    assert [(one.number, one.value) for one in study.trials] == [(0, 1.0)]
    shaky.before = ["get_all_trials"] * 1000
    with pytest.warns(RuntimeWarning), pytest.raises(optuna.exceptions.StorageInternalError):
        study.get_trials(deepcopy=False)
    assert sum(pauses) > storage.PATIENCE_S


def test_a_server_that_refuses_or_was_never_there_is_not_waited_for() -> None:
    class Refusing:
        def get_study_id_from_name(self, name: str) -> int:
            raise ValueError(name)

        def get_n_trials(self) -> int:
            raise optuna.exceptions.StorageInternalError("commit") from OperationalError("away")

    patient = PatientStorage(Refusing())
    with pytest.raises(optuna.exceptions.StorageInternalError):
        patient.get_n_trials()
    with pytest.raises(ValueError, match="a study"):
        patient.get_study_id_from_name("a study")


def test_a_study_waits_for_the_disk_once_a_second_and_is_read_by_optuna_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synced = [100.0], []
    monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(storage.os, "fsync", lambda number: synced.append(now[0]))
    path = tmp_path / "study.journal"
    study = storage.create_study(path, name="a")
    for value in range(4):
        now[0] += 0.4
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        study.tell(trial, value)
    assert synced == [100.0, pytest.approx(101.2)]
    plain = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    assert [one.value for one in optuna.load_study(study_name="a", storage=plain).trials] == [0, 1, 2, 3]
