from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flatout.measure.arms.knock_out.knock_out import Shares, keep_gradients, keep_random_state
from flatout.measure.batches import KeptBatch
from flatout.measure.evidence import Place, Site, StackPath, Stacks
from flatout.measure.loading.loader_records import LoaderRecord
from flatout.measure.patches import Patches


def line(number: int) -> Place:
    return Place(file="model.py", line=number)


def test_the_share_of_lines_holds_what_they_call_and_their_backward_pass() -> None:
    paths = (
        StackPath(phase="forward", places=(line(3), line(20)), samples=20),
        StackPath(phase="rest", places=(line(4),), samples=10),
        StackPath(phase="backward", places=(line(5),), samples=40),
    )
    stacks = Stacks(num_steps=2, samples_by_phase={"forward": 40, "rest": 20, "backward": 40}, paths=paths)
    context: Any = SimpleNamespace(stacks=stacks, sites=(), attributed_step_s=None, step_s=1.0)
    shares = Shares(context)
    assert shares.of("model.py", 1, 3) == pytest.approx(0.4)  # a fifth, and half of the backward pass
    assert shares.of("model.py", 20, 20) == pytest.approx(0.4)
    assert shares.of("model.py", 4, 4) == pytest.approx(0.1)
    assert shares.of("other.py", 1, 99) == 0.0
    assert not shares.makes_batches("model.py", 1, 9)
    site = Site(kind="row", op="x", place=line(7), via=None, calls_per_step=9, host_s=0.2, backward_s=0.4)
    context = SimpleNamespace(stacks=None, sites=(site,), attributed_step_s=2.0, step_s=1.0)
    assert Shares(context).of("model.py", 6, 8) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("step_s", "is_ragged", "lengths", "expected"),
    [
        (5.0, True, 3, True),
        (5.0, False, [3] * 99, True),  # lengths may decide about shapes
        (5.0, False, 3, False),
        (1.0, True, [3] * 99, False),
    ],
)
def test_long_steps_are_not_spent_on_finding_out_that_shapes_may_differ(
    step_s: float, is_ragged: bool, lengths: Any, expected: bool
) -> None:
    record = LoaderRecord(loader=None, place=None, config={})
    for length in (7, 9 if is_ragged else 7):
        batch = (torch.ones(4, length), lengths)
        record.note_shapes(batch, 4)
        record.kept.append(KeptBatch(batch))
    loaders = SimpleNamespace(trained_on=lambda: record)
    context: Any = SimpleNamespace(stacks=None, sites=(), step_s=step_s, loaders=loaders)
    assert Shares(context).are_ragged == expected


def test_random_numbers_go_on_where_they_were() -> None:
    put_back = keep_random_state()
    drawn: list[Any] = [torch.rand(2).tolist(), random.random()]
    put_back()
    assert [torch.rand(2).tolist(), random.random()] == drawn


def test_parameters_without_a_gradient_get_zeros_until_undone() -> None:
    used, lost, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.SGD([used, lost, frozen], lr=0.1)
    (used * lost).sum().backward()
    patches = Patches()
    keep_gradients([optimizer], patches)
    for _ in range(2):
        optimizer.zero_grad()
        (used * 2).sum().backward()
        assert used.grad is not None and used.grad.tolist() == [2.0, 2.0]
        assert lost.grad is not None and lost.grad.tolist() == [0.0, 0.0]
        assert frozen.grad is None  # it had none before
    patches.undo()
    optimizer.zero_grad()
    (used * 2).sum().backward()
    assert lost.grad is None


def test_zeros_are_sparse_where_the_last_gradient_was() -> None:
    """SparseAdam refuses dense gradients, and takes time in proportion to the rows of a sparse one."""
    table = nn.Embedding(9, 2, sparse=True)
    head = nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SparseAdam(table.parameters()), torch.optim.SGD([head], lr=0.1)]
    rows = torch.tensor([1, 4, 4])
    (table(rows) * head).sum().backward()
    patches = Patches()
    keep_gradients(optimizers, patches)
    for optimizer in optimizers:
        optimizer.zero_grad()
    before = table.weight.detach().clone()
    (head * 2).sum().backward()
    patches.undo()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    assert table.weight.grad._indices().tolist() == [[1, 4, 4]]
    assert not table.weight.grad.to_dense().any()
    optimizers[0].step()
    assert table.weight.equal(before)
