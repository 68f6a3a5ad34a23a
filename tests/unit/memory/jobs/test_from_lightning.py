"""LightningModules as jobs, stepped without a Trainer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.ground.errors import BadInput
from flatout.memory.jobs.from_lightning import job_of_class, optimizer_in
from flatout.memory.jobs.from_objects import is_lightning
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.jobs.step import Parts, make_parts, run_step

lightning = pytest.importorskip("lightning", reason="the dev extra brings lightning")


class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, width: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)
        self.lr = lr
        self.example_input_array = torch.zeros(6, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        self.log_dict({"again": loss})
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)},
        }


def make_batch(*, batch_size: int, width: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, width), torch.zeros(batch_size, dtype=torch.long)


def stepped(job: Job) -> Parts:
    parts = make_parts(job, Recipe(), device="cpu")
    run_step(parts, job, Recipe(), job.make_batch(**job.sizes), device="cpu")
    return parts


def test_a_lightning_module_is_known_by_its_methods() -> None:
    assert is_lightning(Classifier)
    assert not is_lightning(nn.Linear)
    assert not is_lightning(dict)


def test_a_class_with_a_batch_maker_makes_a_step() -> None:
    job = job_of_class(Classifier, settings=None, make_batch=make_batch, name="mine:Classifier")
    assert job.sizes == {"batch_size": 8, "width": 4}
    parts = stepped(job)
    assert isinstance(parts.optimizer, torch.optim.SGD)
    assert parts.optimizer.param_groups[0]["momentum"] == 0.9
    assert {id(p) for p in parts.optimizer.param_groups[0]["params"]} == {
        id(p) for p in parts.model.parameters()
    }
    assert len(parts.optimizer.state) == 2


def test_a_batch_maker_of_the_class_is_used() -> None:
    class Own(Classifier):
        @staticmethod
        def make_batch(batch_size: int = 3) -> tuple[Tensor, Tensor]:
            return make_batch(batch_size=batch_size)

    job = job_of_class(Own, settings=None, name="Own")
    assert job.sizes == {"batch_size": 3}
    stepped(job)


def test_the_example_input_is_a_batch_where_there_is_no_other() -> None:
    class Reconstructs(Classifier):
        def training_step(self, batch: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": self(batch).square().mean()}

    job = job_of_class(Reconstructs, settings=None, name="Reconstructs")
    assert job.sizes == {"batch_size": 6}
    batch = job.make_batch(batch_size=9)
    assert tuple(batch.shape) == (9, 4) and batch.device.type == "cpu"
    stepped(job)


def test_settings_build_the_class_in_both_of_the_command_lines_shapes() -> None:
    for settings in (
        {"model": {"class_path": "mine.Classifier", "init_args": {"width": 7}}, "trainer": {"precision": 32}},
        {"model": {"width": 7, "unknown": 1}},
    ):
        job = job_of_class(Classifier, settings=settings, make_batch=make_batch, name="Classifier")
        assert job.make_model().layer.in_features == 7  # type: ignore[union-attr]


def test_a_required_argument_that_is_missing_is_named() -> None:
    class Needy(Classifier):
        def __init__(self, depth: int, heads: int, width: int = 4) -> None:
            super().__init__(width)

    with pytest.raises(BadInput, match="mine:Needy cannot be built: depth, heads not given"):
        job_of_class(Needy, settings={}, make_batch=make_batch, name="mine:Needy")


def test_no_batch_is_told_with_the_way_to_name_one() -> None:
    class Bare(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = None

    with pytest.raises(BadInput, match=r"Bare has neither make_batch nor example_input_array.*make_batch"):
        job_of_class(Bare, settings=None, name="Bare")


def test_optimizing_by_hand_is_refused() -> None:
    class ByHand(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    job = job_of_class(ByHand, settings=None, make_batch=make_batch, name="ByHand")
    with pytest.raises(BadInput, match="ByHand optimizes by hand"):
        stepped(job)


def test_a_step_without_a_loss_is_refused() -> None:
    class Lossless(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            return None

    with pytest.raises(BadInput, match="training_step of Lossless returned NoneType, not a loss"):
        stepped(job_of_class(Lossless, settings=None, make_batch=make_batch, name="Lossless"))


def test_an_optimizer_that_wants_the_trainer_is_one_line() -> None:
    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0 / self.trainer.estimated_stepping_batches)

    job = job_of_class(Scheduled, settings=None, make_batch=make_batch, name="Scheduled")
    with pytest.raises(BadInput, match="configure_optimizers of Scheduled raised RuntimeError"):
        stepped(job)


def test_every_shape_of_configured_optimizers_is_understood() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for given in (
        optimizer,
        [optimizer],
        ([optimizer], ["scheduler"]),
        {"optimizer": optimizer, "lr_scheduler": {}},
        [{"optimizer": optimizer}],
    ):
        assert optimizer_in(given, name="mine") is optimizer
    for given, count in ((None, 0), ([optimizer, optimizer], 2), ([[optimizer], []], 0)):
        with pytest.raises(BadInput, match=f"gives {count} optimizers"):
            optimizer_in(given, name="mine")


def test_a_job_keeps_no_model_alive() -> None:
    job = job_of_class(Classifier, settings=None, make_batch=make_batch, name="Classifier")
    parts = stepped(job)
    model = weakref.ref(parts.model)
    del parts
    gc.collect()
    assert model() is None
    with pytest.raises(BadInput, match="before its model is made"):
        job.make_optimizer([])
