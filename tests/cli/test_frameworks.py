"""Frameworks and the library form: loops that are not in the script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _len_torch_function_stack
from torch.utils.data import DataLoader, TensorDataset, dataloader

import flatout
from flatout.doctor.loading import made_by
from flatout.measure.run.step_blocks import schedule
from tests.support.cli import ARMS, assert_measured, line_of, observe
from tests.support.measure import BRIEF


def test_the_hugging_face_trainer(tmp_path: Path) -> None:
    evidence = observe("hugging_face.py", tmp_path, save=tmp_path / "evidence.json").measured
    assert_measured(evidence, anchor="AdamW.step")
    (loader,) = evidence.loaders
    assert (loader.dataset, loader.batch_size, loader.num_batches) == ("Sentences", 8, 80)
    assert (evidence.job.framework, made_by(loader)) == ("transformers", "transformers")
    (created,) = (site for site in evidence.sites if site.op == "arange" and site.via is None)
    assert created.place.function == "Sentences.__getitem__"
    assert created.calls_per_step == 8.0


def test_accelerate_with_accumulation(tmp_path: Path) -> None:
    evidence = observe("accelerated.py", save=tmp_path / "evidence.json").measured
    assert_measured(evidence, anchor="SGD.step", batches=2)
    (loader,) = evidence.loaders
    assert loader.place is not None
    assert loader.place.line == line_of("accelerated.py", "loader = DataLoader")
    assert (evidence.job.framework, made_by(loader)) == (None, None)


# The library form


@pytest.fixture(autouse=True)
def blocks_of_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BRIEF.items():
        monkeypatch.setattr(schedule, name, value)


def observed_owners() -> list[type | ModuleType]:
    """Everything of torch that an observer replaces parts of, and some that it must not."""
    from torch.autograd import graph
    from torch.optim import optimizer
    from torch.utils.data._utils import fetch, worker

    return [
        nn.Module,
        torch.Tensor,
        torch.autograd,
        graph,
        torch.optim.Optimizer,
        optimizer,
        dataloader,
        DataLoader,
        dataloader._BaseDataLoaderIter,
        dataloader._SingleProcessDataLoaderIter,
        dataloader._MultiProcessingDataLoaderIter,
        fetch._MapDatasetFetcher,
        fetch._IterableDatasetFetcher,
        worker,
        sys.modules["torch.distributed.rendezvous"],
    ]


def attributes() -> dict[tuple[str, str], object]:
    import torch._dynamo  # optimizers import it; a module that appears is not a module that changed

    owners = [*observed_owners(), torch._dynamo.utils]
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


@pytest.fixture
def torch_unchanged() -> Any:
    """Compares all of torch that can be observed before and after the test."""
    from torch._dynamo import eval_frame
    from torch.optim import optimizer

    hooks = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    before, hooks_before = attributes(), [dict(each) for each in hooks]
    assert len(before) > 300
    yield
    after = attributes()
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if after[name] is not value] == []
    assert [dict(each) for each in hooks] == hooks_before
    assert _len_torch_function_stack() == 0
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert eval_frame._stance.stance == "default"
    assert sys.getprofile() is None


def training() -> Callable[[Any], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        inputs, targets = batch
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def tensors(num_batches: int) -> tuple[Tensor, Tensor]:
    return torch.randn(16 * num_batches, 64), torch.randn(16 * num_batches, 1)


@pytest.mark.usefixtures("torch_unchanged")
def test_a_function_and_a_dataloader_whose_workers_go_on() -> None:
    loader = DataLoader(TensorDataset(*tensors(20)), batch_size=16, num_workers=1, persistent_workers=True)
    diagnosis = flatout.diagnose(training(), loader, seconds=60.0)
    evidence = diagnosis.evidence
    assert_measured(evidence, anchor="flatout.step")
    assert evidence.job.ended == "measured"
    assert {worker.worker for worker in evidence.loaders[0].workers} == {0}
    # the workers that were watched serve the caller's own loop as well
    assert [[tuple(part.shape) for part in batch] for batch in loader] == [[(16, 64), (16, 1)]] * 20


@pytest.mark.usefixtures("torch_unchanged")
def test_a_function_and_a_list_of_batches() -> None:
    batches = [tensors(1) for _ in range(12)]
    diagnosis = flatout.diagnose(training(), batches, seconds=60.0)
    assert_measured(diagnosis.evidence, anchor="flatout.step")
    assert diagnosis.evidence.loaders[0].num_workers is None
    assert {step.rows for step in diagnosis.evidence.steps if step.arm == "half"} == {8}


@pytest.mark.usefixtures("torch_unchanged")
@pytest.mark.parametrize("arm", sorted(ARMS - {"warmup"}))
def test_an_exception_of_the_function_reaches_the_caller(arm: str) -> None:
    train, reached = training(), False

    def follow(message: str) -> None:
        nonlocal reached
        reached = message.startswith(arm)

    def step(batch: Any) -> None:
        train(batch)
        if reached:
            raise KeyError("the caller's own")

    loader = DataLoader(TensorDataset(*tensors(20)), batch_size=16)
    with pytest.raises(KeyError, match="the caller's own"):
        flatout.diagnose(step, loader, seconds=60.0, on_progress=follow)
    train(tensors(1))
