"""A run has a folder of its own: the one named, a free one among all runs, or the latest to resume."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from flatout.engines.run.folder import (
    Outcome,
    check_empty,
    choose_folder,
    draw_if_possible,
    find_begun,
    record_run,
)
from flatout.ground import ignore, runs
from flatout.ground.errors import BadInput, MissingExtra


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLATOUT_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_folder_that_is_named_is_taken(tmp_path: Path) -> None:
    for resume in (False, True):
        assert choose_folder("here", kind="evolve", name="x", resume=resume) == Path("here")


def test_without_a_name_a_run_gets_one_among_all_runs_and_resume_finds_the_latest(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no run of flatout evolve to resume.*--out"):
        choose_folder(None, kind="evolve", name="sums", resume=True)
    folder = choose_folder(None, kind="evolve", name="sums")
    assert folder.parent == tmp_path / ".flatout" / "runs" and "evolve-sums" in folder.name
    assert not folder.exists()
    with record_run(folder, kind="evolve", name="sums"):
        assert runs.read_run(folder).kind == "evolve"
        assert choose_folder(None, kind="evolve", name="sums") != folder
    assert (tmp_path / ".flatout" / ".gitignore").is_file()
    assert choose_folder(None, kind="evolve", name="sums", resume=True) == folder
    with pytest.raises(BadInput, match="no run of flatout adapt"):
        choose_folder(None, kind="adapt", name="sums", resume=True)


def test_a_job_that_torchrun_starts_again_resumes_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = choose_folder(None, kind="evolve", name="sums")
    with record_run(folder, kind="evolve", name="sums"):
        pass
    for name, value in {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    own = choose_folder(None, kind="evolve", name="sums", resume=True)  # it crashed before it had one
    assert own != folder and not own.exists()
    with record_run(own, kind="evolve", name="sums"):
        pass
    assert choose_folder(None, kind="evolve", name="sums", resume=True) == own


@pytest.mark.parametrize("out", [None, "named"])
def test_a_job_finds_the_run_that_it_has_begun(out: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "sums"}.items():
        monkeypatch.setenv(name, value)
    assert find_begun(out, kind="evolve") is None
    folder = choose_folder(out, kind="evolve", name="sums")
    with contextlib.suppress(KeyboardInterrupt), record_run(folder, kind="evolve", name="sums"):
        assert find_begun(out, kind="evolve") == folder
        raise KeyboardInterrupt
    assert find_begun(out, kind="evolve") == folder
    for other in ("others", "none"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", other)
        assert find_begun(out, kind="evolve") is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "sums")
    with record_run(folder, kind="evolve", name="sums"):
        pass
    assert find_begun(out, kind="evolve") is None  # it is finished


def test_a_folder_with_files_of_others_is_refused(tmp_path: Path) -> None:
    check_empty(tmp_path / "absent")
    (tmp_path / runs.RUN_FILE).write_text("{}")
    (tmp_path / "mine").mkdir()
    check_empty(tmp_path, besides=("mine",))
    with pytest.raises(BadInput, match="is not empty: it holds mine"):
        check_empty(tmp_path)


def test_an_outcome_names_its_folder() -> None:
    assert Outcome(out="x").out == "x"
    ignore("anything")


def test_a_picture_that_cannot_be_drawn_costs_one_line() -> None:
    def refuse() -> Path:
        raise MissingExtra("matplotlib is not installed", hint="pip install")

    told: list[str] = []
    assert draw_if_possible(lambda: Path("a.png"), on_progress=told.append) == "a.png" and told == []
    assert draw_if_possible(refuse, on_progress=told.append) is None
    assert len(told) == 1 and told[0].startswith("no plot: matplotlib is not installed")
