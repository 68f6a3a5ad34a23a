"""The list of runs: what is opened first, that a key is never a path, and what is told of each run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flatout.ground.runs import create_run, end_run
from flatout.monitor.fleet.nodes import Fleet
from flatout.monitor.past.history import HistoryWriter
from flatout.monitor.sampler import Sampler
from flatout.monitor.web import run_list as room
from flatout.monitor.web.run_list import MACHINE, FleetRuns, RunList
from tests.support.monitor_web import HOSTILE, START_S, logged_run, run, sample


def test_the_latest_run_is_opened_where_nothing_is_said(tmp_path: Path) -> None:
    create_run(run("first", pid=1), tmp_path)
    later = create_run(run("second", pid=2, ended_s=START_S + 9), tmp_path)
    shutil.copytree(later, tmp_path / "20991231-235959-copy-1")
    runs = RunList(root=tmp_path)
    assert len(runs.entries) == 3
    assert runs.first == [next(iter(runs.folders))]
    states = {entry.name: entry.state for entry in runs.entries}
    assert states["second"] == "ended"


def test_a_node_whose_page_does_not_answer_says_why() -> None:
    (entry,) = FleetRuns(Fleet(["http://127.0.0.1:1/"])).entries  # a port of nobody
    assert (entry.name, entry.state, entry.ending) == ("n/a", "silent", "silent: connection refused")


def test_folders_that_are_given_come_first_even_from_elsewhere(tmp_path: Path) -> None:
    inside = create_run(run("inside", pid=1), tmp_path / "runs")
    outside = create_run(run("outside", pid=2), tmp_path / "elsewhere")
    runs = RunList(folders=[outside, inside], root=tmp_path / "runs")
    assert runs.first == [outside.name, inside.name]
    assert [entry.name for entry in runs.entries] == ["outside", "inside"]


def test_two_folders_of_one_name_have_two_keys(tmp_path: Path) -> None:
    one = create_run(run("same", pid=1), tmp_path / "a")
    two = create_run(run("same", pid=1), tmp_path / "b")
    assert one.name == two.name
    runs = RunList(folders=[two], root=tmp_path / "a")
    assert sorted(runs.folders.values()) == sorted([one, two])


def test_the_samplers_own_run_is_opened_first(tmp_path: Path) -> None:
    folder = create_run(run("own", pid=2, ended_s=START_S + 1), tmp_path)
    create_run(run("other"), tmp_path)
    own = RunList(sampler=Sampler(job=folder), root=tmp_path)
    assert own.first == [own.own_key] == [folder.name]


def test_a_machine_without_a_job_opens_the_run_that_is_under_way(tmp_path: Path) -> None:
    ended = create_run(run("ended", pid=2, ended_s=START_S + 9), tmp_path)
    machine = RunList(sampler=Sampler(), root=tmp_path)
    assert machine.first == [MACHINE]
    assert machine.entries[0].name == "this machine"
    assert MACHINE not in machine.folders
    under_way = create_run(run("under way"), tmp_path)
    machine.read()
    assert machine.first == [under_way.name]
    assert RunList(sampler=Sampler(), folders=[ended], root=tmp_path).first == [ended.name]


def test_the_log_of_this_machine_that_the_page_itself_keeps_is_not_listed_twice(tmp_path: Path) -> None:
    create_run(run(MACHINE, pid=2, ended_s=START_S + 9), tmp_path)
    create_run(run(MACHINE), tmp_path)
    of_machine = RunList(sampler=Sampler(), root=tmp_path)
    assert [(entry.name, entry.state) for entry in of_machine.entries] == [
        ("this machine", "running"),
        (MACHINE, "ended"),
    ]
    assert len(RunList(root=tmp_path).entries) == 2


def test_the_oldest_of_many_runs_are_counted_and_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_LISTED", 3)
    for number in range(5):
        create_run(run(f"run {number}", pid=2 + number, ended_s=START_S + 9), tmp_path)
    runs = RunList(root=tmp_path)
    assert (len(runs.entries), runs.num_unlisted) == (3, 2)


def test_a_run_that_appears_is_found_and_one_that_is_damaged_left_out(tmp_path: Path) -> None:
    runs = RunList(root=tmp_path)
    assert runs.entries == ()
    assert runs.first == []
    folder = create_run(run(HOSTILE, pid=3), tmp_path)
    (tmp_path / "rubbish").mkdir()
    [entry] = runs.read()
    assert entry.to_json()["name"] == HOSTILE
    assert entry.key == folder.name
    end_run(folder, time_s=START_S, end="ValueError: x", exit_code=1)
    assert runs.read()[0].to_json()["ending"] == "failed: ValueError: x"
    (folder / "run.json").write_text("{")
    assert runs.read() == ()


def test_each_run_tells_what_bounded_it_and_its_last_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starved = logged_run(tmp_path, [sample(second) for second in range(90)], name="starved", pid=1)
    healthy = [sample(second, busy=0.95, wait=0.02) for second in range(90)]
    logged_run(tmp_path, healthy, name="healthy", pid=2)
    create_run(run("empty", pid=3), tmp_path)
    reads = []
    glance_at = room.glance_at
    monkeypatch.setattr(room, "glance_at", lambda folder: reads.append(folder.name) or glance_at(folder))
    runs = RunList(root=tmp_path)
    told = {entry.name: entry.to_json() for entry in runs.entries}
    assert (told["starved"]["bound"], told["healthy"]["bound"]) == ("data", "healthy")
    assert told["starved"]["loss"] == pytest.approx(sample(89).job.loss, rel=1e-3)  # type: ignore[union-attr]
    assert told["starved"]["last_s"] == START_S + 89
    assert not {"bound", "loss", "last_s"} & told["empty"].keys()
    runs.read()
    assert len(reads) == 2  # a log that has not grown is not read again
    HistoryWriter(starved)(sample(90))
    runs.read()
    assert len(reads) == 3


def test_a_look_at_many_runs_reads_a_few_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_READ", 2)
    for pid in range(1, 6):
        logged_run(tmp_path, [sample(second) for second in range(3)], pid=pid)
    runs = RunList(root=tmp_path)
    for known in (2, 4, 5):
        assert sum(entry.glance.last_s is not None for entry in runs.entries) == known
        runs.read()
