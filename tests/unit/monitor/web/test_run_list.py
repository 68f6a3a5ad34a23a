"""The list of runs: what is opened first, and that a key is never a path."""

from __future__ import annotations

import shutil
from pathlib import Path

from flatout.monitor.sampler import Sampler
from flatout.monitor.web.run_list import MACHINE, RunList
from flatout.runs import create_run
from tests.support.monitor_web import HOSTILE, START_S, run


def test_the_latest_run_is_opened_where_nothing_is_said(tmp_path: Path) -> None:
    create_run(run("first", pid=1), tmp_path)
    later = create_run(run("second", pid=2, ended_s=START_S + 9), tmp_path)
    shutil.copytree(later, tmp_path / "20991231-235959-copy-1")
    runs = RunList(root=tmp_path)
    assert len(runs.entries) == 3
    assert runs.first == [next(iter(runs.folders))]
    states = {entry.name: entry.state for entry in runs.entries}
    assert states["second"] == "ended"


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


def test_a_run_that_appears_is_found_and_one_that_is_damaged_left_out(tmp_path: Path) -> None:
    runs = RunList(root=tmp_path)
    assert runs.entries == ()
    assert runs.first == []
    folder = create_run(run(HOSTILE, pid=3), tmp_path)
    (tmp_path / "rubbish").mkdir()
    [entry] = runs.read()
    assert entry.to_json()["name"] == HOSTILE
    assert entry.key == folder.name
    (folder / "run.json").write_text("{")
    assert runs.read() == ()
