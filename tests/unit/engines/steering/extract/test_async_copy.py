"""Results arrive complete and in order."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from flatout.engines.steering.extract.async_copy import AsyncCopy, prioritise_launches


def copied_from(device: str, *, batches: int = 8) -> tuple[list[int], list[Tensor]]:
    rows: list[int] = []
    values: list[Tensor] = []

    def keep(some: Sequence[int], copied: Tensor) -> None:
        rows.extend(some)
        values.append(copied)

    with AsyncCopy(keep) as landing:
        for number in range(batches):
            landing.take([number], torch.full((1, 4), float(number), device=device))
    return rows, values


def test_results_on_the_host_arrive_at_once() -> None:
    rows, values = copied_from("cpu")
    assert rows == list(range(8))
    assert torch.cat(values)[:, 0].tolist() == list(range(8))


@pytest.mark.gpu
def test_results_of_a_gpu_arrive_in_order_in_memory_of_their_own() -> None:
    rows, values = copied_from("cuda")
    assert rows == list(range(8))
    assert all(one.is_pinned() for one in values)
    assert torch.cat(values)[:, 0].tolist() == list(range(8))


@pytest.mark.gpu
def test_an_error_of_the_receiver_is_not_lost() -> None:
    def refuse(some: Sequence[int], copied: Tensor) -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"), AsyncCopy(refuse) as landing:
        landing.take([0], torch.zeros(1, 4, device="cuda"))


def test_threads_take_turns_as_before_once_the_work_is_done() -> None:
    before = sys.getswitchinterval()
    with prioritise_launches():
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before
    with contextlib.suppress(KeyboardInterrupt), prioritise_launches():
        raise KeyboardInterrupt
    assert sys.getswitchinterval() == before


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_the_garbage_collector_leaves_old_objects_alone_until_the_work_is_done() -> None:
    old = [[]]  # type: ignore[var-annotated]
    with prioritise_launches():
        made = [[]]  # type: ignore[var-annotated]
        assert gc.get_freeze_count() > 0
        walked = {id(one) for one in gc.get_objects()}
        assert id(made) in walked
        assert id(old) not in walked
    assert gc.get_freeze_count() == 0
    assert any(one is old for one in gc.get_objects())


@pytest.mark.usefixtures("nothing_frozen")
def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with prioritise_launches():
        pass
    assert gc.get_freeze_count() > 0
