"""Real training loops of torch that know nothing of Flatout, reported all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.ground.runs import CHANNEL_FILE, list_runs
from flatout.monitor.job.autopatch import install
from flatout.monitor.job.channel import JobRecord, read_channel
from flatout.monitor.job.watch import end_watching, watch

ROWS = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))


@pytest.fixture(autouse=True)
def _watched(tmp_path: Path) -> Iterator[None]:
    plain = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    run = watch(line=False, folder=tmp_path).run
    assert run is not None
    run.on_own_report = install(torch, run.reporter).undo
    yield
    run.own_reporter()  # the patches go
    end_watching()
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is plain


def train(*, epochs: int = 1, accumulate: int = 1, evaluate: bool = False) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(epochs):
        for number, (x, y) in enumerate(DataLoader(ROWS, batch_size=4)):
            (model(x) - y).square().mean().backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                for x, _ in DataLoader(ROWS, batch_size=4):
                    model(x)


def reported(folder: Path) -> JobRecord:
    end_watching()
    ((run, _),) = list_runs(folder)
    found = read_channel(run / CHANNEL_FILE)
    assert found is not None
    return found


def test_steps_waits_rows_and_learning_rate_are_reported(tmp_path: Path) -> None:
    train(epochs=2)
    found = reported(tmp_path)
    assert (found.steps, found.samples, found.learning_rate, found.sees_data) == (12, 48, 0.25, True)
    assert found.host_s["wait"] > 0
    assert found.host_s["rest"] > 0


def test_an_accumulated_step_is_one_step(tmp_path: Path) -> None:
    train(accumulate=3)
    found = reported(tmp_path)
    assert (found.steps, found.samples) == (2, 24)


def test_an_evaluation_is_no_part_of_a_step(tmp_path: Path) -> None:
    train(epochs=2, evaluate=True)
    found = reported(tmp_path)
    assert (found.steps, found.samples) == (12, 48)


def test_several_optimizers_make_one_step_together(tmp_path: Path) -> None:
    models = [nn.Linear(3, 1) for _ in range(2)]
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    for x, _ in DataLoader(ROWS, batch_size=2):
        for optimizer, model in ((first, models[0]), (first, models[0]), (second, models[1])):
            model(x).sum().backward()
            optimizer.step()
    # The rarer one ends a step; before it appeared, the other was taken for it.
    assert 12 <= reported(tmp_path).steps <= 14


def test_a_script_that_watches_itself_is_counted_once(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(DataLoader(ROWS, batch_size=4)) as watched:
        for x, _ in watched:
            model(x).sum().backward()
            optimizer.step()
            watched.step(loss=0.5)
    found = reported(tmp_path)
    assert (found.steps, found.samples, found.loss) == (6, 24, 0.5)


def test_workers_deliver_through_the_same_place(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in DataLoader(ROWS, batch_size=8, num_workers=1):
        model(x).sum().backward()
        optimizer.step()
    found = reported(tmp_path)
    assert (found.steps, found.samples) == (3, 24)
