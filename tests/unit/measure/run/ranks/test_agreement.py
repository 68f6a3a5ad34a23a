from __future__ import annotations

import importlib
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed

from flatout.measure.patches import Patches
from flatout.measure.run.ranks import agreement as ranks
from flatout.measure.run.ranks.agreement import Agreement
from flatout.measure.run.step_blocks.schedule import StepBlock, plan_rounds

BLOCKS = plan_rounds(0.1, seconds=60.0, labels=["cached", "half"])


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


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
