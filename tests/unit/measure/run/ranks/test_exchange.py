from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as distributed

from flatout.measure.run.ranks import exchange
from flatout.measure.run.ranks.exchange import MARK, Exchange
from tests.support.doctor import evidence_of_rank

FAST, SLOW = (evidence_of_rank(rank, own_s=1.0 + rank, waiting_s=3.0 - rank) for rank in (0, 1))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A launch of two ranks, whose temporary files lie below the test's folder."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "host/a",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    move_to(monkeypatch, tmp_path / "tmp")
    return monkeypatch


def move_to(launch: pytest.MonkeyPatch, machine: Path) -> None:
    """The temporary folder of another machine."""
    machine.mkdir(exist_ok=True)
    launch.setattr(exchange.tempfile, "gettempdir", lambda: str(machine))


def as_rank(launch: pytest.MonkeyPatch, rank: int, evidence_path: Path) -> Exchange:
    launch.setenv("RANK", str(rank))
    made = Exchange(evidence_path)
    made.begin()
    return made


@pytest.mark.parametrize("shared", ["evidence", "tmp"])
def test_evidence_of_the_other_ranks_is_gathered_from_a_folder_that_both_see(
    launch: pytest.MonkeyPatch, tmp_path: Path, shared: str
) -> None:
    first = as_rank(launch, 0, tmp_path / "a" / "evidence.json")
    if shared == "evidence":
        move_to(launch, tmp_path / "tmp of another machine")
    folder = "a" if shared == "evidence" else "a disk of its own"
    as_rank(launch, 1, tmp_path / folder / "evidence.json").publish(SLOW)
    launch.setenv("RANK", "0")
    gathered = first.gather(FAST)
    assert [each.rank for each in gathered.ranks] == [0, 1]
    assert gathered.job.rank == 1  # the slowest, with its whole evidence
    assert gathered.steps == SLOW.steps
    first.clear()
    assert not list((tmp_path / "a").rglob("*"))


def test_a_node_that_shares_no_folder_sends_through_the_store(
    launch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agent = distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    launch.setenv("MASTER_ADDR", "127.0.0.1")
    launch.setenv("MASTER_PORT", str(agent.port))
    launch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    launch.setattr(exchange, "FOLDERS_FIRST_S", -1.0)
    launch.setattr(exchange, "CHUNK_BYTES", 100)
    first = as_rank(launch, 0, tmp_path / "a" / "evidence.json")
    move_to(launch, tmp_path / "tmp of another machine")
    as_rank(launch, 1, tmp_path / "b" / "evidence.json").publish(SLOW)
    assert not (tmp_path / "b").exists()
    launch.setenv("RANK", "0")
    gathered = first.gather(FAST)
    assert [each.rank for each in gathered.ranks] == [0, 1]
    assert gathered.steps == SLOW.steps


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(
    launch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = as_rank(launch, 0, tmp_path / "evidence.json")
    (next(tmp_path.glob(".flatout-ranks-*")) / "rank-1.json").write_text("{")
    assert [each.rank for each in first.gather(FAST, timeout_s=0.0).ranks] == [0]


def test_a_mark_of_a_process_that_is_gone_is_not_trusted(launch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = as_rank(launch, 0, tmp_path / "evidence.json")
    for mark in tmp_path.rglob(MARK):
        assert json.loads(mark.read_text())["pid"] == os.getpid()
        mark.write_text(json.dumps({**json.loads(mark.read_text()), "pid": 2**22 + 1}))
    as_rank(launch, 1, tmp_path / "evidence.json").publish(SLOW)
    launch.setenv("RANK", "0")
    assert [each.rank for each in first.gather(FAST, timeout_s=0.0).ranks] == [0]


def test_what_an_earlier_launch_left_is_removed(launch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_rank(launch, 0, tmp_path / "evidence.json")
    as_rank(launch, 1, tmp_path / "evidence.json").publish(SLOW)
    again = as_rank(launch, 0, tmp_path / "evidence.json")
    assert [each.rank for each in again.gather(FAST, timeout_s=0.0).ranks] == [0]
