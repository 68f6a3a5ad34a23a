"""Results arrive complete and in order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flatout.engines.steering.landing import PENDING, Landing


def landed_from(device: str, *, batches: int = 8) -> tuple[list[int], list[Tensor], Landing]:
    rows: list[int] = []
    values: list[Tensor] = []

    def keep(some: Sequence[int], landed: Tensor) -> None:
        rows.extend(some)
        values.append(landed)

    landing = Landing(keep)
    for number in range(batches):
        landing.take([number], torch.full((1, 4), float(number), device=device))
    return rows, values, landing


def test_results_on_the_host_arrive_at_once() -> None:
    rows, values, landing = landed_from("cpu")
    assert rows == list(range(8))
    landing.finish()
    assert torch.cat(values)[:, 0].tolist() == list(range(8))


@pytest.mark.gpu
def test_results_of_a_gpu_arrive_in_order_in_memory_of_their_own() -> None:
    rows, values, landing = landed_from("cuda")
    assert len(rows) == 8 - PENDING
    landing.finish()
    assert rows == list(range(8))
    assert all(one.is_pinned() for one in values)
    assert torch.cat(values)[:, 0].tolist() == list(range(8))
