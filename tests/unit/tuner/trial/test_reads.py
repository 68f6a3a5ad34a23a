from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from flatout.measure.patches import Patches
from flatout.tuner.trial.reads import Reads


def test_batches_are_numbered_by_loader_and_numbers_are_those_the_script_reads() -> None:
    reads, patches = Reads((1, 3)), Patches()
    reads.install(torch, patches)
    try:
        data = TensorDataset(torch.arange(8.0))
        for _epoch in range(2):
            list(DataLoader(data, batch_size=4))
        list(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4))
        x = torch.tensor(1.5, requires_grad=True)
        torch.optim.Adam([x], lr=0.1, foreach=False)
        values = x.item(), float(torch.tensor(2)), f"{torch.tensor(2.5):.1f}", torch.tensor(True).item()
        torch.testing.assert_close(torch.ones(1), torch.ones(1))  # torch's own reads are not the script's
    finally:
        patches.undo()
    torch.tensor(9.0).item()
    assert values == (1.5, 2.0, "2.5", True) and reads.scalars == [1.5, 2.0, 2.5, 1.0]
    assert reads.batches.keys() == {"1.1", "1.3", "2.1"}
    assert reads.batches["1.1"] == reads.batches["1.3"] == reads.batches["2.1"]  # the first of an epoch
    assert reads.num_skipped == 0


def test_every_batch_is_looked_at_where_times_do_not_count() -> None:
    reads, patches = Reads((1,), all_batches=True), Patches()
    reads.install(torch, patches)
    try:
        list(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    finally:
        patches.undo()
    assert list(reads.batches) == ["1.1", "1.2", "1.3", "1.4"] and len(set(reads.batches.values())) == 4
