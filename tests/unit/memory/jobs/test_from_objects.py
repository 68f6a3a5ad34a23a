"""Jobs from a model or a step that exist already: copies that are true, and originals that stay untouched."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flatout.ground.errors import BadInput
from flatout.memory.jobs.from_objects import copy_model, job_of, optimizer_maker, own_loss
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.jobs.optimizer_copies import OptimizerSequence
from flatout.memory.jobs.step import Parts, make_parts, run_step
from tests.support.memory import traced


class Tied(nn.Module):
    """Two layers with one weight, a buffer, and a tensor that is neither."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((width,), 2.0))
        self.offset = torch.full((width,), 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale + self.offset


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def stepped(job: Job) -> Parts:
    parts = make_parts(job, Recipe(), device="cpu")
    run_step(parts, job, Recipe(), job.make_batch(**job.sizes), device="cpu")
    return parts


def test_a_copy_computes_the_same_and_shares_nothing() -> None:
    model = Tied()
    twin = copy_model(model)
    x = torch.randn(3, 4)
    assert torch.equal(twin(x), model(x))
    addresses = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not addresses & {tensor.data_ptr() for tensor in twin.state_dict().values()}


def test_an_average_of_the_weights_in_a_list_is_copied_too() -> None:
    model = Tied()
    model.averages = [torch.optim.swa_utils.AveragedModel(model)]  # type: ignore[assignment]
    with FakeTensorMode(allow_non_fake_inputs=True):
        twin = copy_model(model)
    (average,) = twin.averages  # type: ignore[misc]
    assert all(isinstance(each, FakeTensor) for each in average.parameters())


def test_lazy_layers_are_to_be_called_first() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(BadInput, match="lazy layers whose sizes are not known"):
        copy_model(model)
    model(torch.ones(2, 4))
    assert copy_model(model)[0].weight.shape == (3, 4)  # type: ignore[index]


def test_a_copy_keeps_ties_and_frozen_parameters_but_no_gradients() -> None:
    model = Tied()
    mean_square(model, torch.randn(2, 4)).backward()
    twin = copy_model(model)
    assert isinstance(twin, Tied)
    assert twin.first.weight is twin.second.weight
    assert not twin.second.bias.requires_grad
    assert all(parameter.grad is None for parameter in twin.parameters())
    assert model.first.weight.grad is not None


def test_a_copy_lies_on_the_default_device() -> None:
    model = Tied()
    with torch.device("meta"):
        twin = copy_model(model)
    assert {parameter.device.type for parameter in twin.parameters()} == {"meta"}
    back = copy_model(twin)
    assert {parameter.device.type for parameter in back.parameters()} == {"cpu"}


def test_a_copy_under_fake_tensors_takes_no_memory() -> None:
    model = Tied()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        twin = copy_model(model)
    held = [*twin.parameters(), *twin.buffers(), twin.offset]
    assert len(held) == 5
    assert all(isinstance(tensor, FakeTensor) for tensor in held)


def test_a_model_that_cannot_be_copied_says_what_to_do() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(BadInput, match=r"Linear cannot be copied: .*lock.*pkg.module:build"):
        copy_model(model)


def test_a_job_of_a_model_trains_a_copy() -> None:
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    job = job_of(model, torch.randn(6, 4), loss=mean_square)
    assert job.sizes == {"batch_size": 6}
    assert job.name == "Tied"
    parts = stepped(job)
    assert not torch.equal(parts.model.state_dict()["first.weight"], before["first.weight"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_models_own_loss_is_found_in_every_shape() -> None:
    class Returns(nn.Module):
        def __init__(self, wrap: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.wrap = wrap

        def forward(self, x: Tensor) -> Any:
            return self.wrap((x * self.weight).mean())

    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    x = torch.ones(2, 3)
    for wrap in (lambda loss: loss, lambda loss: {"loss": loss}, Output):
        for batch in (x, {"x": x}, (x,)):
            assert own_loss(Returns(wrap), batch).item() == 1.0


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(BadInput, match=r"Linear returns \(2, 5\), which is not a loss"):
        own_loss(nn.Linear(3, 5), torch.ones(2, 3))
    with pytest.raises(BadInput, match="Identity returns dict, which is not a loss"):
        own_loss(nn.Identity(), ({"logits": torch.ones(2)},))


def test_an_optimizer_is_kept_with_its_groups_and_without_its_state() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [{"params": model[1].parameters(), "lr": 0.5}, {"params": model[0].parameters(), "momentum": 0.9}],
        lr=0.1,
    )
    mean_square(model, torch.ones(2, 3)).backward()
    optimizer.step()
    twin = copy_model(model)
    trainable = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    like = optimizer_maker(optimizer, model=model)(trainable)
    assert isinstance(like, torch.optim.SGD)
    assert [(group["lr"], group["momentum"]) for group in like.param_groups] == [(0.5, 0), (0.1, 0.9)]
    assert [[id(p) for p in group["params"]] for group in like.param_groups] == [
        [id(twin[1].weight), id(twin[1].bias)],  # type: ignore[index]
        [id(twin[0].weight)],  # type: ignore[index]
    ]
    assert not like.state
    assert optimizer.state
    mean_square(twin, torch.ones(2, 3)).backward()
    like.step()
    assert set(like.state) == {twin[0].weight}  # type: ignore[index]


def test_an_optimizer_may_be_a_class_or_a_function_or_absent() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    assert type(optimizer_maker(None, model=None)(parameters)) is torch.optim.AdamW
    assert type(optimizer_maker(torch.optim.SGD, model=None)(parameters)) is torch.optim.SGD
    made = optimizer_maker(lambda p: torch.optim.Adam(p, lr=3.0), model=None)(parameters)
    assert made.param_groups[0]["lr"] == 3.0


def test_an_optimizer_of_another_model_and_other_things_are_refused() -> None:
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(BadInput, match="SGD holds none of the model's trainable parameters"):
        optimizer_maker(stranger, model=nn.Linear(1, 1))
    with pytest.raises(BadInput, match="an existing optimizer belongs"):
        optimizer_maker(stranger, model=None)
    with pytest.raises(BadInput, match="the optimizer is str"):
        optimizer_maker("adamw", model=None)


def test_a_step_is_taken_apart_into_its_loss() -> None:
    model, head = nn.Linear(3, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        assert optimizer.defaults["lr"] == 0.1
        return F.cross_entropy(head(model(batch[0])), batch[1])

    before = model.weight.clone()
    job = job_of(step, (torch.randn(5, 3), torch.zeros(5, dtype=torch.long)))
    parts = stepped(job)
    assert type(parts.optimizer) is torch.optim.SGD
    assert sum(parameter.numel() for parameter in parts.model.parameters()) == 12 + 4 + 8 + 2
    assert all(parameter.grad is not None for parameter in parts.model.parameters())
    assert torch.equal(model.weight, before) and model.weight.grad is None


GLOBAL_MODEL = nn.Linear(2, 1)


def step_with_a_global(batch: Tensor) -> Tensor:
    loss: Tensor = GLOBAL_MODEL(batch).mean()
    return loss


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        self.weight = 3.0

    def step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch).mean() * self.weight
        return loss


def test_a_step_may_use_a_global_or_be_a_method() -> None:
    trainer = Trainer()
    for step, original in ((step_with_a_global, GLOBAL_MODEL), (trainer.step, trainer.model)):
        parts = stepped(job_of(step, torch.randn(4, 2)))
        assert isinstance(parts.model, nn.Linear) and parts.model is not original
        assert parts.model.weight.grad is not None
        assert original.weight.grad is None


def test_a_step_is_evaluated_without_gradients() -> None:
    recipe = Recipe(mode="evaluate")
    job = job_of(step_with_a_global, torch.randn(4, 2))
    parts = make_parts(job, recipe, device="cpu")
    run_step(parts, job, recipe, job.make_batch(**job.sizes), device="cpu")
    assert all(parameter.grad is None for parameter in parts.model.parameters())


def test_a_step_that_runs_backward_itself_is_refused() -> None:
    model = nn.Linear(2, 1)

    def step(batch: Tensor) -> None:
        model(batch).mean().backward()

    with pytest.raises(BadInput, match=r"step runs backward itself \(.*test_from_objects.py:\d+\)"):
        job_of(step, torch.ones(2, 2))


def test_steps_that_cannot_be_planned_are_refused() -> None:
    with pytest.raises(BadInput, match="names no module"):
        job_of(lambda batch: batch.sum(), torch.ones(2, 2))
    with pytest.raises(BadInput, match="expected a module or a step function, got int"):
        job_of(3, torch.ones(2, 2))
    with pytest.raises(BadInput, match="plain function or method, got builtin"):
        job_of(len, torch.ones(2, 2))


class Deciding(nn.Module):
    """A mask, a counter, a list of rates and a table in a plain list decide what a step does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("keep", torch.arange(32) < 6)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("rates", torch.tensor([0.25, 2.0]))
        self.tables = [torch.tensor([0, 1, 1, 0, 1])]

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, self.keep]
        for _ in range(int(self.count)):
            x = x + 1
        if self.rates[0] > 0.5:
            raise AssertionError("the rate is known")
        return self.layer(x)[self.tables[0].nonzero()[:, 0]]


def test_masks_counters_and_tables_of_a_given_model_have_their_values_in_a_trace() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found = model(batch)
        assert found.shape == (3, 2)
        return found.sum()  # type: ignore[no-any-return]

    trace = traced(job_of(Deciding(), torch.ones(8, 32), loss=loss), Recipe())
    assert not trace.guesses


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module_is_refused_with_a_way_on() -> None:
    model = nn.Linear(2, 2)
    model.inner = torch.jit.trace(nn.ReLU(), torch.ones(2))
    with pytest.raises(BadInput, match=r"Linear holds a scripted module.*before torch\.jit"):
        copy_model(model)


def test_what_makes_a_module_is_no_module() -> None:
    def make() -> nn.Module:
        return nn.Linear(2, 2)

    with pytest.raises(BadInput, match=r"got the class Flatten.*give a module: Flatten\(\.\.\.\)"):
        job_of(nn.Flatten, torch.ones(4, 2))
    with pytest.raises(BadInput, match=r"a module beside loss=, got the function .*make.*omit loss="):
        job_of(make, torch.ones(4, 2), loss=lambda model, batch: model(batch).sum())


def test_a_step_that_returns_no_loss_is_refused_when_it_runs() -> None:
    model = nn.Linear(2, 1)

    def step(batch: Tensor) -> float:
        return model(batch).mean().item()

    with pytest.raises(BadInput, match="returned float, not a loss"):
        stepped(job_of(step, torch.ones(2, 2)))


def test_the_modules_that_a_loss_names_are_part_of_the_job() -> None:
    model, teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
    centres = nn.Linear(3, 7)
    both = [*model.parameters(), *centres.parameters()]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (centres(model(batch)).sum() + (model(batch) - teacher(batch)).square().sum()) * 1.0

    job = job_of(model, torch.ones(2, 4), loss=loss, optimizer=torch.optim.SGD(both, lr=0.1))
    whole = job.make_model()
    assert sum(p.numel() for p in whole.parameters()) == 15 + 15 + 28
    trainable = [p for p in whole.parameters() if p.requires_grad]
    job.loss(whole, torch.ones(2, 4)).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in trainable)
    assert all(p.grad is None for p in both)
    optimizer = job.make_optimizer(trainable)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, trainable))


def test_a_loss_may_name_the_model_itself_and_modules_without_weights() -> None:
    model, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()

    def loss(given: nn.Module, batch: Tensor) -> Tensor:
        return criterion(given(batch), torch.zeros(2, dtype=torch.long)) + 0.0 * model.in_features  # type: ignore[no-any-return]

    job = job_of(model, torch.ones(2, 4), loss=loss)
    assert type(job.make_model()) is nn.Linear
    assert job.loss is loss


def test_a_step_that_names_two_optimizers_has_both() -> None:
    model, critic = nn.Linear(4, 3), nn.Linear(3, 1)
    first, second = torch.optim.Adam(model.parameters()), torch.optim.SGD(critic.parameters(), lr=0.1)

    def step(batch: Tensor) -> Tensor:
        assert first is not None and second is not None
        return critic(model(batch)).sum()  # type: ignore[no-any-return]

    job = job_of(step, torch.ones(2, 4))
    whole = job.make_model()
    optimizer = job.make_optimizer(list(whole.parameters()))
    assert isinstance(optimizer, OptimizerSequence)
    assert [type(each) for each in optimizer.optimizers] == [torch.optim.Adam, torch.optim.SGD]
