from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

from flatout.measure.clock import BACKWARD, FORWARD, OPTIMIZER, REST, TRANSFER
from flatout.measure.lines.function_modes import keep_in_backward
from flatout.measure.patches import Patches
from flatout.measure.phases import install_phases, install_transfers
from flatout.measure.run.observer import Observer, ObserverOptions

HERE = Path(__file__)


@pytest.fixture
def observer() -> Iterator[Observer]:
    observer = Observer(ObserverOptions(folder=str(HERE.parent)))
    observer.install()
    yield observer
    observer.remove()


class Regions(nn.Module):
    """Notes the regions that are open when it runs."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer, self.seen = observer, list[list[int]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(list(self.observer.clock.stack))
        return x


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def test_only_the_outermost_model_call_is_a_forward(observer: Observer) -> None:
    inner = Regions(observer)
    nn.Sequential(nn.Sequential(inner), inner)(torch.ones(2))
    assert inner.seen == [[REST, FORWARD]] * 2
    assert observer.num_forwards == 1
    assert observer.clock.stack == [REST]
    assert observer.clock.take()[FORWARD] > 0


def test_a_wrapper_of_the_jobs_own_stays_around_every_module(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    call: Any = nn.Module.__call__

    @functools.wraps(call)
    def theirs(module: Any, *args: Any) -> Any:
        called.append(type(module).__name__)
        return call(module, *args)

    monkeypatch.setattr(nn.Module, "__call__", theirs)
    model = nn.Sequential(nn.Identity())
    model(torch.ones(2))
    observer.settle()
    model(torch.ones(2))
    assert called == ["Sequential", "Identity"] * 2


def test_a_model_that_raises_leaves_the_clock_as_it_was(observer: Observer) -> None:
    with pytest.raises(RuntimeError):
        nn.Linear(3, 2)(torch.ones(5))
    assert observer.clock.stack == [REST]


class Noting(torch.autograd.Function):
    """Notes the regions that are open in its backward."""

    seen: list[list[int]]
    observer: Observer

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Noting.seen.append(list(Noting.observer.clock.stack))
        return gradient


@pytest.mark.parametrize("call", ["tensor", "autograd", "grad"])
def test_backward_is_a_region_however_it_is_called(observer: Observer, call: str) -> None:
    Noting.seen, Noting.observer = [], observer
    x = parameter()
    loss = Noting.apply(x).sum()
    if call == "tensor":
        loss.backward()
    elif call == "autograd":
        torch.autograd.backward([loss])
    else:
        torch.autograd.grad(loss, x)
    assert Noting.seen == [[REST, BACKWARD]]
    assert observer.num_backwards == (0 if call == "grad" else 1)
    assert observer.clock.stack == [REST]
    assert observer.clock.take()[BACKWARD] > 0


def test_a_backward_inside_a_backward_is_one(observer: Observer) -> None:
    x = parameter()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                y = parameter()
                (y * 2).sum().backward()
            return gradient

    Nested.apply(x).sum().backward()
    assert observer.num_backwards == 1
    assert observer.clock.stack == [REST]


def test_an_optimizer_step_is_a_region_and_ends_the_step(observer: Observer) -> None:
    x = parameter()
    optimizer = torch.optim.SGD([x], lr=0.1)
    x.grad = torch.ones(3)
    optimizer.step()
    assert observer.optimizer is optimizer
    assert observer.anchor.name == "SGD.step"
    assert observer.loaders.num_steps == 1
    assert observer.begun
    optimizer.step()
    (row,) = observer.rows
    assert row.totals[OPTIMIZER] > 0
    assert sum(row.totals) == pytest.approx(row.host_s)


def test_what_a_closure_does_is_not_the_optimizers(observer: Observer) -> None:
    model = Regions(observer)
    x = parameter()
    optimizer = torch.optim.LBFGS([x], max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure=closure)
    assert len(model.seen) >= 2
    assert all(stack == [REST, OPTIMIZER, REST, FORWARD] for stack in model.seen)
    assert observer.num_backwards == len(model.seen)
    assert observer.anchor.counts[observer.anchor.current or (0, 0)] == 2
    assert observer.clock.stack == [REST]


def test_training_that_an_arm_may_have_ended_goes_on(observer: Observer) -> None:
    """Without a block the gradients vanish, and one `step` of L-BFGS believes that it is done."""
    x, calls = parameter(), 0
    optimizer = torch.optim.LBFGS([x], max_iter=20, lr=0.01)

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            observer.num_arms = 1
        observer.finished = calls == 9
        optimizer.zero_grad()
        loss = x.pow(2).sum() * (calls < 5)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert calls == 9  # it would have been done after five


def test_an_optimizer_inside_an_optimizer_is_one_step(observer: Observer) -> None:
    class Wrapping(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__([parameter()], {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    wrapping = Wrapping(torch.optim.SGD([parameter()], lr=0.1))
    wrapping.step()
    wrapping.step()
    assert observer.anchor.name == "Wrapping.step"
    assert observer.loaders.num_steps == 2


def test_a_step_that_raised_is_forgotten(observer: Observer) -> None:
    """Scripts catch an out-of-memory in the first step and go on."""
    optimizer = torch.optim.SGD([parameter()], lr=0.1)

    def closure() -> torch.Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        optimizer.step(closure)
    for _ in range(3):
        optimizer.step()
    assert observer.loaders.num_steps == 3
    assert observer.clock.stack == [REST]


def test_other_threads_are_left_alone_once_training_began(observer: Observer) -> None:
    x = parameter()
    optimizer = torch.optim.SGD([x], lr=0.1)
    optimizer.step()

    def elsewhere() -> None:
        model = nn.Linear(3, 1)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        other.step()

    before = (observer.num_forwards, observer.num_backwards, observer.loaders.num_steps)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert (observer.num_forwards, observer.num_backwards, observer.loaders.num_steps) == before


def test_training_in_a_thread_is_adopted(observer: Observer) -> None:
    def train() -> None:
        optimizer = torch.optim.SGD([parameter()], lr=0.1)
        for _ in range(3):
            optimizer.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert len(observer.rows) == 2


def test_the_losses_are_those_of_an_unobserved_run() -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        seen = []
        for _ in range(5):
            loss = model(torch.randn(6, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    plain = losses()
    observer = Observer(ObserverOptions(folder=str(HERE.parent)))
    observer.install()
    try:
        assert losses() == plain
    finally:
        observer.remove()


def test_transfers_are_a_region_for_tensors_of_the_host() -> None:
    observer = Observer(ObserverOptions(folder=str(HERE.parent)))
    patches = Patches()
    to = torch.Tensor.to
    install_transfers(observer, patches)
    try:
        assert torch.ones(3).to("meta").device.type == "meta"
    finally:
        patches.undo()
    assert observer.clock.take()[TRANSFER] > 0
    assert observer.clock.stack == [REST]
    assert torch.Tensor.to is to


def test_everything_of_torch_is_as_it_was_after_the_observation() -> None:
    def patched() -> list[Any]:
        return [
            nn.Module.__dict__["__call__"],
            torch.autograd.backward,
            torch.autograd.grad,
            torch.Tensor.backward,
            torch.optim.Optimizer.__init__,
            torch.autograd._engine_run_backward,
            torch.autograd.graph._engine_run_backward,
            torch.optim.Optimizer._patch_step_function,
            torch.optim.SGD.__dict__["step"],
            torch.optim.LBFGS.__dict__["step"],
        ]

    torch.optim.SGD([parameter()])
    before = patched()
    observer = Observer(ObserverOptions(folder=str(HERE.parent)))
    patches = Patches()
    install_phases(observer, patches)
    keep_in_backward(None, patches)
    assert patched()[:3] != before[:3]
    patches.undo()
    assert all(one is other for one, other in zip(patched(), before, strict=True))


class Part(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def train_on_parts() -> Callable[[], None]:
    # each with a forward of its own: compiled code belongs to the code of a function
    codes = [FunctionType(Part.forward.__code__.replace(), globals()) for _ in range(12)]
    parts = [torch.compile(type("Own", (Part,), {"forward": code})(), backend="eager") for code in codes]
    x = nn.Parameter(torch.ones(3, 6))
    optimizer = torch.optim.Adam([x])

    def step() -> None:
        torch.stack([part(x) for part in parts]).mean().backward()
        optimizer.step()

    return step


def train_on_a_compiled_step() -> Callable[[], None]:
    model = nn.Linear(6, 6)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(3, 6)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return torch.compile(step, backend="eager")


def train_with_a_compiled_optimizer() -> Callable[[], None]:
    model = nn.Linear(6, 6)
    optimizer = torch.optim.Adam(model.parameters())
    update = torch.compile(optimizer.step, backend="eager")
    x = torch.ones(3, 6)

    def step() -> None:
        model(x).square().mean().backward()
        update()

    return step


def train_with_less_overhead() -> Callable[[], None]:
    model = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 6)

    def step() -> None:
        model(x).mean().backward()
        optimizer.step()

    return step


def what_dynamo_did(make: Callable[[], Callable[[], None]], *, num_steps: int) -> dict[str, Any]:
    """Graphs, breaks, guards and reasons of a job, from dynamo's own records."""
    from torch._dynamo import utils

    torch._dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    step = make()
    for _ in range(num_steps):
        step()
    compiled = [each for each in utils.get_compilation_metrics() if each.co_name is not None]
    return {
        "counters": {name: dict(utils.counters[name]) for name in ("frames", "stats")},
        "breaks": dict(utils.counters["graph_break"]),
        "guards": [(each.co_name, each.guard_count) for each in compiled],
        "recompiled": [each.recompile_reason for each in compiled],
    }


@pytest.mark.parametrize(
    ("make", "num_graphs"),
    [
        (train_on_parts, 12),
        (train_on_a_compiled_step, 2),
        (train_with_a_compiled_optimizer, 1),
        (train_with_less_overhead, 1),
    ],
)
@pytest.mark.filterwarnings("ignore")  # inductor's and dynamo's own
def test_dynamo_does_not_see_the_instruments(
    make: Callable[[], Callable[[], None]], num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flatout.measure.run.step_blocks import schedule

    monkeypatch.setattr(schedule, "MOST_STACK_STEPS", 2)
    num_steps = 40  # through the longest warm-up and every pass
    what_dynamo_did(make, num_steps=2)  # and what it does once in a process
    plain = what_dynamo_did(make, num_steps=num_steps)
    assert plain["counters"]["stats"]["unique_graphs"] == num_graphs
    options = ObserverOptions(folder=str(HERE.parent), counterfactuals=False, seconds=600)
    observer = Observer(options)
    observer.install()
    try:
        assert what_dynamo_did(make, num_steps=num_steps) == plain
    finally:
        observer.remove()
    seen = {row.arm for row in observer.rows}
    assert {"real", "count", "stacks", "kernels", "memory", "attribution"} <= seen
    assert not any("failed" in reason for reason in observer.tools.missing)
