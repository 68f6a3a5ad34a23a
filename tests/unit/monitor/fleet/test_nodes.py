"""Nodes of folders and of pages: which there are, and how they stand."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.ground.runs import create_run, end_run
from flatout.monitor.fleet.nodes import LIST_EVERY_S, SILENT_S, Fleet
from flatout.monitor.past.history import HistoryWriter
from flatout.monitor.web.server import PageServer
from tests.support.monitor_web import START_S, logged_run, run, sample


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_folder_has_one_node_for_each_host_and_its_figures(tmp_path: Path) -> None:
    for number, host in enumerate(("node-10", "node-2", "node-2")):
        logged_run(tmp_path, [sample(second) for second in range(30)], pid=number + 1, host=host)
    states = Fleet([str(tmp_path)]).look()
    assert [state.node for state in states] == ["node-2", "node-10"]
    assert {state.state for state in states} == {"running"}
    assert states[0].bound == "data"
    assert states[0].steps == 174
    assert states[0].gpu_share is not None and 0.4 < states[0].gpu_share < 0.8


def test_two_jobs_of_one_machine_from_two_folders_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    keys = [
        logged_run(folder, [sample(1)], pid=number, host="node-1" if number < 3 else "node-2").name
        for number, folder in enumerate(folders, start=1)
    ]
    states = Fleet([str(folder) for folder in folders]).look()
    assert sorted(state.node for state in states) == [f"node-1 ({keys[0]})", f"node-1 ({keys[1]})", "node-2"]


def test_a_node_that_says_nothing_is_silent_and_comes_back(tmp_path: Path) -> None:
    clock = Clock()
    folder = logged_run(tmp_path, [sample(1)], host="elsewhere")
    fleet = Fleet([str(tmp_path)], clock=clock)
    assert [state.state for state in fleet.look()] == ["running"]
    clock.now_s += SILENT_S + 1
    (silent,) = fleet.look()
    assert (silent.state, silent.silent_s) == ("silent", SILENT_S + 1)
    writer = HistoryWriter(folder)
    writer(sample(2))
    writer.close()
    assert [state.state for state in fleet.look()] == ["running"]
    end_run(folder, time_s=START_S + 3, end="finished")
    clock.now_s += LIST_EVERY_S
    assert [state.state for state in fleet.look()] == ["ended"]


def test_a_process_of_this_machine_is_asked_itself(tmp_path: Path) -> None:
    create_run(run("gone", pid=2**22 + 1, host=socket.gethostname()), tmp_path)
    assert [state.state for state in Fleet([str(tmp_path)]).look()] == ["died"]


def test_pages_and_folders_stand_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="starlette is not installed: flatout[web]")
    logged_run(tmp_path / "a", [sample(second) for second in range(9)], host="a")
    logged_run(tmp_path / "b", [sample(second) for second in range(9)], name="served")
    with PageServer(root=tmp_path / "b", token=True) as server:
        fleet = Fleet([str(tmp_path / "a"), server.url])
        states = fleet.look()
        assert sorted(state.run for state in states) == ["served", "train"]
        assert all((server.token or "") not in node.key for node in fleet.nodes)
        served = next(node for node in fleet.nodes if node.run is not None and node.run.name == "served")
        log = fleet.open_log(served.key)
        assert log is not None and len(log.past()) == 9
    assert fleet.open_log("no such key") is None
    lost = next(state for state in fleet.look() if state.run == "served")
    assert lost.problem == "connection refused"
    (never,) = Fleet([server.url]).look()
    assert (never.run, never.state, never.problem) == (None, "silent", "connection refused")


def test_a_source_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="there is no folder"):
        Fleet(["/no/such/folder"])
