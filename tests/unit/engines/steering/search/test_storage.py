"""Where a study may lie, and what is said of a place where it cannot."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest

from flatout.engines.steering.search import storage
from flatout.engines.steering.search.space import Space
from flatout.engines.steering.search.storage import create_study, hide_password, open_storage
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
    assert isinstance(proxy, optuna.storages.GrpcStorageProxy)
    with pytest.raises(BadInput, match=r"sqlite://.*SQLite locks"):
        open_storage("sqlite:///study.db")


def test_a_missing_database_driver_is_named() -> None:
    pytest.importorskip("sqlalchemy")
    for driver in ("psycopg2", "psycopg"):
        try:
            __import__(driver)
        except ImportError:
            continue
        pytest.skip(f"{driver} is installed: the address would be dialled")
    with pytest.raises(BadInput, match="needs a driver"):
        open_storage("postgresql://localhost/study")


def test_a_password_is_never_shown() -> None:
    assert hide_password("postgresql://me:secret@host/db") == "postgresql://me:...@host/db"
    assert hide_password("grpc://host:13000") == "grpc://host:13000"


def test_a_storage_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be reached"):
        create_study(tmp_path / "file" / "run" / "study.journal", name="s")


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
