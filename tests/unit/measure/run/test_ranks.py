from __future__ import annotations

import dataclasses
import importlib
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure import PHASES
from flatout.measure.evidence import Evidence, Step
from flatout.measure.evidence_file import save_evidence
from flatout.measure.patches import Patches
from flatout.measure.run import ranks
from flatout.measure.run.ranks import Agreement, clear, gather, merge, partial_path, publish, rank_summary
from flatout.measure.run.schedule import StepBlock, plan_rounds
from tests.support import doctor as builders

BLOCKS = plan_rounds(0.1, seconds=60.0, labels=["cached", "half"])


def of_rank(rank: int, *, own_s: float, waiting_s: float) -> Evidence:
    """A rank that works for `own_s` and waits for the others in backward."""
    phases_s = {"forward": own_s, "backward": waiting_s}
    step = Step(index=0, arm="real", block=0, step_s=own_s + waiting_s, phases_s=phases_s)
    return builders.cpu_evidence(
        job=builders.job(rank=rank, command=(f"rank {rank}",)), steps=(step,), missing=(f"of rank {rank}",)
    )


@given(work_s=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6, unique=True), data=st.data())
def test_the_slowest_rank_speaks_for_the_job(work_s: list[float], data: st.DataObject) -> None:
    """All take the same time by the wall: the fast ones wait for the slow one in backward."""
    slowest = work_s.index(max(work_s))
    made = [of_rank(i, own_s=own_s, waiting_s=12.0 - own_s) for i, own_s in enumerate(work_s)]
    merged = merge(data.draw(st.permutations(made)), world_size=len(made))
    assert merged.steps == made[slowest].steps
    assert (merged.job.rank, merged.job.world_size) == (slowest, len(made))
    assert merged.job.command == ("rank 0",)
    assert [each.rank for each in merged.ranks] == list(range(len(made)))
    assert [each.phases_s["forward"] for each in merged.ranks] == work_s


def test_ranks_that_left_nothing_are_said() -> None:
    merged = merge([of_rank(0, own_s=1.0, waiting_s=0.0)], world_size=4)
    assert any("1 of 4 ranks" in message for message in merged.missing)
    assert not any(
        "ranks" in message for message in merge([of_rank(0, own_s=1.0, waiting_s=0.0)], world_size=1).missing
    )


def test_a_rank_is_summed_up_with_every_phase() -> None:
    summary = rank_summary(of_rank(3, own_s=1.0, waiting_s=2.0))
    assert (summary.rank, summary.step_s) == (3, 3.0)
    assert set(summary.phases_s) == set(PHASES)


def test_a_rank_without_steps_has_no_step_time() -> None:
    empty = dataclasses.replace(builders.bare_evidence(), job=builders.job(rank=1))
    assert rank_summary(empty).step_s is None
    assert merge([of_rank(0, own_s=1.0, waiting_s=0.0), empty], world_size=2).job.rank == 0


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_evidence_of_the_other_ranks_is_gathered_from_the_shared_folder(
    two_ranks: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    two_ranks.setenv("RANK", "1")
    partial = partial_path(folder)
    save_evidence(of_rank(1, own_s=3.0, waiting_s=1.0), partial)
    assert list(folder.glob("rank-*.json")) == []  # nobody reads it before it is complete
    publish(partial)
    two_ranks.setenv("RANK", "0")
    gathered = gather(of_rank(0, own_s=1.0, waiting_s=3.0), folder)
    assert [each.rank for each in gathered.ranks] == [0, 1]
    assert gathered.job.rank == 1
    clear(folder)
    assert not folder.exists()


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(
    two_ranks: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rank-1.json").write_text("{")
    gathered = gather(of_rank(0, own_s=1.0, waiting_s=3.0), tmp_path, timeout_s=0.0)
    assert [each.rank for each in gathered.ranks] == [0]


def test_what_an_earlier_launch_left_is_removed(two_ranks: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("rank-0.json", "partial-0.json"):
        (tmp_path / name).write_text("old")
    assert not partial_path(tmp_path).exists()
    assert list(tmp_path.iterdir()) == []


def test_the_ranks_of_one_launch_share_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host/a")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    first = ranks.shared_folder()
    monkeypatch.setenv("RANK", "1")
    assert ranks.shared_folder() == first
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert ranks.shared_folder() != first
    assert "/" not in first.name


# -- the plan


def never() -> list[StepBlock]:
    raise AssertionError("no plan is to be made")


def test_alone_the_plan_starts_at_once() -> None:
    agreement = Agreement()
    assert agreement.plan(4, False, never) is None
    assert agreement.plan(5, True, lambda: BLOCKS) == BLOCKS
    assert not agreement.shared


def test_ranks_start_the_plan_of_rank_0_at_the_same_step(
    two_ranks: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two agreements over the store of a real process group of one."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        first, second = Agreement(), Agreement()

        def ask(agreement: Agreement, rank: str, index: int, ready: bool, make: Any = never) -> Any:
            two_ranks.setenv("RANK", rank)
            return agreement.plan(index, ready, make)

        assert ask(second, "1", 6, True) is None  # ready, but that is not its decision
        assert ask(first, "0", 6, False) is None
        assert ask(first, "0", 7, True, lambda: BLOCKS) is None
        started = {
            index: (ask(first, "0", index, True), ask(second, "1", index, True)) for index in range(8, 13)
        }
        assert first.shared and second.shared
        at = [index for index, plans in started.items() if plans == (BLOCKS, BLOCKS)]
        assert at == list(range(7 + ranks.LEAD_STEPS, 13))
        assert all(plans == (None, None) for index, plans in started.items() if index not in at)
    finally:
        distributed.destroy_process_group()


def test_blocks_survive_the_store() -> None:
    from flatout.ground.codec import decode, encode

    assert [decode(StepBlock, each) for each in json.loads(json.dumps(encode(BLOCKS)))] == BLOCKS


# -- a second attempt under the same launcher


def test_a_second_attempt_does_not_read_what_the_first_left_in_the_store(
    two_ranks: pytest.MonkeyPatch,
) -> None:
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    two_ranks.setenv(ranks.ATTEMPT, "0")
    two_ranks.delenv(ranks.ATTEMPT)
    make = rendezvous._create_c10d_store
    patches = Patches()
    ranks.keep_attempts_apart(patches)
    assert rendezvous._create_c10d_store is make  # the first attempt has the store to itself
    ranks.begin_another_attempt()
    ranks.keep_attempts_apart(patches)
    try:
        assert rendezvous._create_c10d_store is not make
        store = rendezvous._create_c10d_store("localhost", 0, 0, 1, timedelta(seconds=30), False)
        store.set("key", "second")
        assert isinstance(store, distributed.PrefixStore)
        assert not store.underlying_store.check(["key"])
    finally:
        patches.undo()
    assert rendezvous._create_c10d_store is make
