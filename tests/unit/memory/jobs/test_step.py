"""A step on real tensors does what a plain training loop does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import Job, Recipe, StepPhase
from flatout.memory.jobs.step import make_parts, run_step
from tests.support.memory import job_of, language_model_job, mlp_job


def stepped(job: Job, recipe: Recipe) -> tuple[nn.Module, list[StepPhase]]:
    torch.manual_seed(0)
    parts = make_parts(job, recipe, device="cpu")
    phases: list[StepPhase] = []
    batch = job.make_batch(**job.sizes)
    run_step(parts, job, recipe, batch, device="cpu", mark=phases.append)
    return parts.model, phases


def with_sgd(**more: Any) -> Job:
    return mlp_job(make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **more)


def test_a_step_is_that_of_a_plain_loop() -> None:
    job = with_sgd()
    model, phases = stepped(job, Recipe())
    torch.manual_seed(0)
    plain = job.make_model()
    batch = job.make_batch(**job.sizes)
    plain(batch).sum().backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert phases == ["forward", "forward", "backward", "optimizer"]


def test_accumulation_over_one_batch_is_one_step_on_it() -> None:
    once, _ = stepped(with_sgd(), Recipe())
    thrice, phases = stepped(with_sgd(), Recipe(accumulation=3))
    for ours, theirs in zip(once.parameters(), thrice.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert phases.count("backward") == 3


def test_gradients_of_the_last_step_are_dropped_not_zeroed() -> None:
    job = with_sgd()
    parts = make_parts(job, Recipe(), device="cpu")
    parameter = next(parts.model.parameters())
    grads = []
    for _ in range(2):
        run_step(parts, job, Recipe(), job.make_batch(**job.sizes), device="cpu")
        grads.append(parameter.grad)
    assert grads[0] is not None
    assert grads[0] is not grads[1]


def test_clipping_bounds_the_gradients() -> None:
    model, _ = stepped(with_sgd(), Recipe(clip_norm=0.5))
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert torch.nn.utils.get_total_norm(grads).item() == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(("precision", "inside", "weights"), [
    ("fp32", torch.float32, torch.float32),
    ("bf16", torch.bfloat16, torch.float32),
    ("pure-bf16", torch.bfloat16, torch.bfloat16),
])  # fmt: skip
def test_the_precision_is_that_of_the_products(
    precision: Any, inside: torch.dtype, weights: torch.dtype
) -> None:
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch.to(next(model.parameters()).dtype))
        seen.append(out.dtype)
        return out.float().sum()

    model, _ = stepped(with_sgd(loss=loss), Recipe(precision=precision))
    assert seen == [inside]
    assert {parameter.dtype for parameter in model.parameters()} == {weights}


def test_only_fp16_has_a_scaler() -> None:
    assert make_parts(mlp_job(), Recipe(precision="bf16"), device="cpu").scaler is None
    parts = make_parts(mlp_job(), Recipe(precision="fp16"), device="cpu")
    assert isinstance(parts.scaler, torch.amp.GradScaler)


def test_frozen_parameters_are_not_given_to_the_optimizer() -> None:
    def half_frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        return model

    job = job_of(half_frozen, lambda batch_size: torch.zeros(batch_size, 2))
    parts = make_parts(job, Recipe(), device="cpu")
    assert parts.optimizer is not None
    assert parts.optimizer.param_groups[0]["params"] == list(parts.model[1].parameters())  # type: ignore[index]


def test_nothing_to_train_is_said() -> None:
    job = job_of(lambda: nn.Linear(2, 2).requires_grad_(False), lambda batch_size: torch.zeros(batch_size, 2))
    with pytest.raises(BadInput, match="no parameter that requires a gradient"):
        make_parts(job, Recipe(), device="cpu")
    assert make_parts(job, Recipe(mode="evaluate"), device="cpu").optimizer is None


def test_checkpointing_is_the_models_own() -> None:
    parts = make_parts(language_model_job(), Recipe(checkpointing=True), device="cpu")
    assert parts.model.is_checkpointed
    with pytest.raises(BadInput, match="gradient_checkpointing_enable"):
        make_parts(mlp_job(), Recipe(checkpointing=True), device="cpu")


def test_evaluation_leaves_no_gradient_and_is_in_eval_mode() -> None:
    model, phases = stepped(mlp_job(), Recipe(mode="evaluate"))
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert phases == ["forward"]


def test_generation_asks_for_the_given_number_of_tokens() -> None:
    asked: dict[str, Any] = {}

    class Generating(nn.Linear):
        def generate(self, **options: Any) -> None:
            asked.update(options, grad=torch.is_grad_enabled())

    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "labels": torch.zeros(2, 3)}
    job = job_of(lambda: Generating(2, 2), lambda batch_size: batch)
    stepped(job, Recipe(mode="generate", new_tokens=7))
    assert asked.pop("input_ids") is batch["input_ids"]
    assert asked == {"min_new_tokens": 7, "max_new_tokens": 7, "do_sample": False, "grad": False}
    with pytest.raises(BadInput, match="generate"):
        stepped(mlp_job(), Recipe(mode="generate"))


def test_a_loss_that_differentiates_is_evaluated_with_gradients_on() -> None:
    def penalty(model: nn.Module, batch: Tensor) -> Tensor:
        given = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        return slope.square().sum()

    model, phases = stepped(mlp_job(loss=penalty), Recipe(mode="evaluate"))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert phases == ["forward"]


def test_another_error_of_an_evaluation_is_not_tried_again() -> None:
    calls: list[bool] = []

    def fail(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        stepped(mlp_job(loss=fail), Recipe(mode="evaluate"))
    assert calls == [False]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda loss: None, "returned None"),
        (lambda loss: {"loss": loss}, "returned a dict"),
        (lambda loss: loss.item(), "returned a float"),
        (lambda loss: loss.expand(3), r"returned a tensor of \(3,\)"),
        (lambda loss: loss.detach(), "no trained weight reaches"),
    ],
    ids=["nothing", "dict", "number", "vector", "detached"],
)
def test_what_backward_cannot_start_from_is_named(returned: Any, told: str) -> None:
    plain = mlp_job()
    job = dataclasses.replace(plain, loss=lambda model, batch: returned(plain.loss(model, batch)))
    with pytest.raises(BadInput, match=told):
        stepped(job, Recipe())


def test_a_wrapped_model_is_to_be_given_as_it_is_before() -> None:
    class DistributedDataParallel(nn.Linear):
        """Torch's own needs a process group."""

    job = job_of(lambda: DistributedDataParallel(4, 4), lambda batch_size: torch.ones(batch_size, 4))
    with pytest.raises(BadInput, match="wrapped by DistributedDataParallel"):
        make_parts(job, Recipe(), device="cpu")


def test_an_optimizer_that_computes_the_loss_itself_is_refused() -> None:
    job = mlp_job(make_optimizer=torch.optim.LBFGS)
    with pytest.raises(BadInput, match="LBFGS computes the loss inside its step"):
        make_parts(job, Recipe(), device="cpu")
