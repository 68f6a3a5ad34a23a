from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from flatout.measure.arms.arm import Arm
from flatout.measure.arms.batches.whole_batches import WholeBatches, propose
from flatout.measure.loading.loaders import LoaderWatch

Keep = Callable[..., Iterator[Any]]
Block = Callable[[Arm], None]
X, Y = torch.randn(64, 3), torch.arange(64)


class Rows(Dataset[Any]):
    """NumPy rows by name, with noise on request."""

    def __init__(self, *, noise: bool = False, by_name: bool = True) -> None:
        self.x, self.y, self.noise, self.by_name = X.numpy(), Y.tolist(), noise, by_name

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Any:
        x = self.x[index] + (np.random.rand() if self.noise else 0)
        return {"x": x} if self.by_name else (x, self.y[index])


def make(watch: LoaderWatch) -> WholeBatches:
    return WholeBatches(watch, suspicion=0.5, place=None)


@pytest.mark.parametrize(
    ("data", "of_row"),
    [
        (TensorDataset(X, Y), lambda batch: (batch[0], batch[1])),
        (Subset(TensorDataset(X, Y), range(10, 50)), lambda batch: (batch[0], batch[1])),
        (Rows(), lambda batch: (batch["x"], None)),
    ],
    ids=["tensors", "subset", "names"],
)
def test_batches_are_those_of_the_jobs_sampler(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep, data: Any, of_row: Any
) -> None:
    batches = keep(DataLoader(data, batch_size=8, shuffle=True), num=2)
    arm, state = make(watch), torch.get_rng_state()
    begin(arm)
    assert arm.refusal is None and torch.equal(torch.get_rng_state(), state)
    x, y = of_row(next(batches))
    end(arm)
    if y is not None:
        assert torch.equal(x, X[y])
    assert x.shape == (8, 3) and all((row == X).all(1).any() for row in x)
    assert watch.stand_in is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [(Rows(noise=True), "differs from"), (Rows(by_name=False), "all at once: TypeError")],
    ids=["noise", "a list"],
)
def test_a_dataset_that_gives_other_batches_is_refused(
    watch: LoaderWatch, begin: Block, end: Block, keep: Keep, data: Any, reason: str
) -> None:
    batches = keep(DataLoader(data, batch_size=8), num=2)
    arm = make(watch)
    begin(arm)
    assert arm.refusal is not None and reason in arm.refusal
    next(batches)  # the job's own
    end(arm)


class Gathers(TensorDataset):
    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("data", "options", "wait_s", "num"),
    [
        (TensorDataset(X, Y), {}, 0.5, 1),
        (TensorDataset(X, Y), {}, 0.01, 0),
        (Gathers(X, Y), {}, 0.5, 0),
        (TensorDataset(X, Y), {"collate_fn": list}, 0.5, 0),
        (TensorDataset(X, Y), {"batch_size": 2}, 0.5, 0),
    ],
    ids=["rows", "no wait", "gathers", "collate", "small"],
)
def test_what_is_proposed(
    watch: LoaderWatch, keep: Keep, context: Any, data: Any, options: Any, wait_s: float, num: int
) -> None:
    batches = keep(DataLoader(data, **{"batch_size": 8, **options}))
    assert len(list(propose(context(phases_s={"wait": wait_s})))) == num
    assert next(batches) is not None
