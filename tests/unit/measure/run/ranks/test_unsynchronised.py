from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as distributed
from torch.nn.parallel import DistributedDataParallel

from flatout.measure.run.ranks.unsynchronised import propose

ANY = cast(Any, None)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_nothing_is_proposed_without_replicas() -> None:
    assert list(propose(ANY)) == []


def test_gradients_stay_unexchanged_in_its_blocks_alone(alone: None) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    exchanged: list[bool] = []

    def hook(_state, bucket):  # type: ignore[no-untyped-def]  # annotations as text are refused
        exchanged.append(True)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    (arm,) = propose(ANY)

    def step() -> int:
        exchanged.clear()
        model(torch.ones(1, 2)).sum().backward()
        return len(exchanged)

    before = step()
    arm.begin()
    within = step()
    arm.end()
    assert (before, within, step()) == (1, 0, 1)


def test_a_static_graph_refuses(alone: None) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 1), static_graph=True)
    (arm,) = propose(ANY)
    assert arm.refusal is not None
    del model
