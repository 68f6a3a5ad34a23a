from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout.measure.arms.batches.served_batches import ServedBatches
from flatout.measure.loading.loaders import LoaderWatch


def test_replaced_batches_are_served_until_the_end(
    watch: LoaderWatch, keep: Callable[..., Iterator[Any]]
) -> None:
    batches = keep(DataLoader(torch.arange(40.0), batch_size=4), 2)
    served = ServedBatches(watch)
    watch.begin_serving("cached")
    assert [batch.tolist() for batch in served.begin()] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    served.replace([torch.full((4,), 90.0), torch.full((3,), 91.0)])
    assert [next(batches)[0].item() for _ in range(3)] == [90.0, 91.0, 90.0]
    assert watch.rows == 4
    served.end()
    assert next(batches)[0].item() == 4.0
    watch.begin_serving(None)
    assert next(batches)[0].item() == 8.0


def test_nothing_is_served_where_nothing_was_kept(watch: LoaderWatch) -> None:
    served = ServedBatches(watch)
    assert served.begin() == []
    served.replace([])
    served.end()
