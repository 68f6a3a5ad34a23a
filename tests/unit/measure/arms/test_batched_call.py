from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.measure.arms import batched_call
from flatout.measure.arms.arm import COMPILED
from flatout.measure.arms.batched_call import BatchedCall, propose
from flatout.measure.clock import EXCLUDED, REST, Clock
from flatout.measure.evidence import ModuleCall, Place
from flatout.measure.user_code import UserCode
from tests.support.measure import line_of

HERE = Path(__file__)


class Model(nn.Module):
    """Notes how many rows each of its calls has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.5))
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.append(len(x))
        return {"energy": self.body[0](x).sum(1)}


def energies(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(row)["energy"] for row in rows.split(1)])  # at: rows


def place(marker: str, function: str) -> Place:
    return Place(file=HERE.name, line=line_of(HERE, marker), function=function)


class Backwards:
    num = 0

    def __call__(self) -> int:
        return self.num


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def backwards() -> Backwards:
    return Backwards()


def make(place: Place, backwards: Backwards) -> BatchedCall:
    user_code = UserCode(str(HERE.parent))
    return BatchedCall(user_code, Clock(), backwards, types=[Model, Mean], place=place, suspicion=0.5)


@pytest.fixture
def arm(backwards: Backwards) -> Iterator[BatchedCall]:
    arm = make(place("rows", "energies"), backwards)
    yield arm
    arm.end()


def test_rows_are_computed_in_one_call(model: Model, arm: BatchedCall) -> None:
    rows = torch.randn(5, 4)
    arm.begin()
    expected = energies(model, rows)
    arm.step_end()
    assert model.calls == [1] * 5
    for _ in range(2):
        model.calls.clear()
        found = energies(model, rows)
        assert torch.allclose(found, expected)
        found.sum().backward()
        arm.step_end()
        assert model.calls == [5]
    arm.end()
    model.calls.clear()
    energies(model, rows)
    assert model.calls == [1] * 5 and arm.refusal is None


def test_gradients_reach_the_parameters_and_what_lies_before(model: Model, arm: BatchedCall) -> None:
    rows, upstream = torch.randn(3, 4), torch.ones(4, requires_grad=True)
    arm.begin()
    energies(model, rows * upstream).sum().backward()
    expected = model.body[0].weight.grad.clone()
    arm.step_end()
    model.zero_grad()
    upstream.grad = None
    energies(model, rows * upstream).sum().backward()
    assert torch.allclose(model.body[0].weight.grad, expected)
    assert upstream.grad is not None and not upstream.grad.any()  # it was computed, from zeros
    arm.step_end()
    assert arm.refusal is None


def stacked(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([model(row)["energy"] for row in rows.unbind()]).squeeze(1)  # at: stacks


def turned(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(row)["energy"] for row in rows.split(1)][::-1])  # at: turned


@pytest.mark.parametrize(("function", "at"), [(energies, "rows"), (stacked, "stacks")])
def test_joined_rows_are_the_one_result_with_its_own_gradients(
    model: Model, arm: BatchedCall, function: Any, at: str
) -> None:
    arm.place = place(at, function.__name__)
    rows, weights = torch.randn(4, 1, 4), torch.arange(1.0, 5.0)
    rows = rows if function is stacked else rows.squeeze(1)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        model.calls.clear()
        joined = function(model, rows)
        (joined * weights).sum().backward()
        arm.step_end()
        return joined.detach().clone(), model.body[0].weight.grad.clone()

    arm.begin()
    expected = step()
    for _ in range(2):
        assert all(map(torch.allclose, step(), expected))
        assert model.calls == [4]
    assert arm.refusal is None


def test_rows_in_another_order_are_joined_as_they_are(model: Model, arm: BatchedCall) -> None:
    arm.place = place("turned", "turned")
    rows = torch.randn(3, 4)
    arm.begin()
    expected = turned(model, rows)
    arm.step_end()
    model.calls.clear()
    assert torch.allclose(turned(model, rows), expected) and model.calls == [3]


class Marks:
    """Notes the borders that the GPU's clock would have."""

    def __init__(self) -> None:
        self.regions: list[int] = []

    def mark(self, region: int, *, always: bool = False) -> None:
        self.regions.append(region)


def pass_on(model: Model, slow_s: float) -> torch.Tensor:
    found = []
    for row in torch.ones(5, 4).split(1):
        found.append(model(row)["energy"])  # at: passed on
        time.sleep(slow_s)
    return torch.cat(found)


@pytest.mark.parametrize("slow_s", [0.0, 0.005])
def test_a_gpu_is_not_timed_while_rows_are_passed_on_and_nothing_else(
    model: Model, arm: BatchedCall, slow_s: float
) -> None:
    arm.place = place("passed on", "pass_on")
    marks = arm._clock.marks = Marks()  # type: ignore[assignment]
    arm.begin()

    def step() -> None:
        pass_on(model, slow_s).sum().backward()
        arm.step_end()

    step()
    marks.regions.clear()
    step()  # finds out what the loop does
    assert arm.fell_back
    arm.fell_back = False
    assert marks.regions == [EXCLUDED, REST]  # taking the rows apart
    if slow_s:
        step()
        assert marks.regions == [EXCLUDED, REST] * 2
    else:
        arm._only_turns = True  # on a busy machine a turn may last
        step()
        assert marks.regions == [EXCLUDED, REST] * 3
    assert not arm.fell_back


def test_the_backward_pass_takes_no_rows_apart(model: Model, arm: BatchedCall) -> None:
    """A fix puts no rows together, and `cat` cuts a gradient out for each row that needs one."""
    rows = torch.randn(6, 4)
    arm.begin()
    energies(model, rows)
    arm.step_end()
    joined = energies(model, rows)
    inputs = [node for node, _ in joined.grad_fn.next_functions if node is not None]
    assert len(inputs) == 1


def test_a_first_row_without_a_gradient_does_not_stand_for_the_others(model: Model, arm: BatchedCall) -> None:
    rows = torch.randn(3, 4)
    arm.begin()
    energies(model, rows).sum().backward()
    arm.step_end()
    energies(model, rows)
    arm.step_end()
    assert arm.refusal == "the first row gets no gradient, so it cannot stand for all of them"


def test_the_turns_of_the_loop_are_not_counted(model: Model, backwards: Backwards) -> None:
    clock = Clock()
    arm = BatchedCall(
        UserCode(str(HERE.parent)),
        clock,
        backwards,
        types=[Model],
        place=place("rows", "energies"),
        suspicion=0.5,
    )
    rows = torch.randn(50, 4)
    arm.begin()
    energies(model, rows).sum().backward()
    arm.step_end()
    assert clock.take()[EXCLUDED] == 0.0
    energies(model, rows).sum().backward()
    split_s = arm._split_s
    arm.end()
    totals = clock.take()
    assert 0.0 < split_s < totals[EXCLUDED] < sum(totals)


def test_calls_beyond_the_first_steps_are_real(model: Model, arm: BatchedCall) -> None:
    arm.begin()
    energies(model, torch.ones(2, 4))
    arm.step_end()
    model.calls.clear()
    assert energies(model, torch.ones(4, 4)).shape == (4,)
    assert model.calls == [2, 1, 1]


def test_other_lines_and_other_modules_are_left_alone(model: Model, arm: BatchedCall) -> None:
    other = Model()
    arm.begin()
    energies(model, torch.ones(3, 4))
    arm.step_end()
    model.calls.clear()
    model(torch.ones(1, 4))
    energies(other, torch.ones(3, 4))
    assert model.calls == [1] and other.calls == [1, 1, 1]


def test_buffers_are_put_back(model: Model, arm: BatchedCall) -> None:
    arm.begin()
    energies(model, torch.ones(3, 4))
    arm.step_end()
    before = model.body[1].running_mean.clone()
    model.body[1].running_mean += 1
    arm.end()
    assert torch.equal(model.body[1].running_mean, before)


def fed_back(model: Model, x: torch.Tensor) -> None:
    for _ in range(3):
        x = x + model(x)["energy"].argmax().view(1, 1)  # at: fed back


def trained_one_by_one(model: Model, backwards: Backwards) -> None:
    for row in torch.ones(3, 4).split(1):
        model(row)["energy"].sum().backward()  # at: one by one
        backwards.num += 1


def of_many_shapes(model: Model) -> None:
    for rows in (1, 2, 3):
        model(torch.ones(rows, 4))  # at: many shapes


def test_calls_that_cannot_be_one_are_refused(model: Model, backwards: Backwards) -> None:
    cases: list[tuple[Any, Place, str]] = [
        (lambda: fed_back(model, torch.ones(1, 4)), place("fed back", "fed_back"), "earlier result"),
        (
            lambda: trained_one_by_one(model, backwards),
            place("one by one", "trained_one_by_one"),
            "backward pass runs between",
        ),
        (lambda: of_many_shapes(model), place("many shapes", "of_many_shapes"), "differ in shape"),
    ]
    for step, where, reason in cases:
        arm = make(where, backwards)
        arm.begin()
        step()
        arm.step_end()
        assert arm.refusal is not None and reason in arm.refusal
        model.calls.clear()
        step()
        assert len(model.calls) == 3
        arm.end()


class Mean(Model):
    """One result for all rows."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.append(len(x))
        return {"energy": self.body[0](x).mean().view(1)}


def test_a_module_that_mixes_its_rows_is_refused(backwards: Backwards) -> None:
    model, rows = Mean(), torch.ones(3, 4)
    arm = make(place("rows", "energies"), backwards)
    arm.begin()
    expected = energies(model, rows)
    arm.step_end()
    assert torch.equal(energies(model, rows), expected)
    assert arm.refusal is not None and "not one row for each" in arm.refusal
    assert model.calls == [1] * 3 + [3] + [1] * 3
    arm.end()


def test_nothing_is_left_behind_after_a_step_that_raised(model: Model, arm: BatchedCall) -> None:
    before = dict(vars(Model))
    arm.begin()
    with pytest.raises(RuntimeError):
        energies(model, torch.ones(3, 5))
    arm.end()
    assert dict(vars(Model)) == before
    assert torch._C._len_torch_function_stack() == 0


def called(**changes: Any) -> ModuleCall:
    facts = {
        "module": "Model",
        "calls_per_step": 48.0,
        "rows": 1,
        "has_parameters": True,
        "host_s": 0.4,
        **changes,
    }
    return ModuleCall(place=place("rows", "energies"), training=True, **facts)


def test_a_module_that_is_called_with_single_rows_is_proposed(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched_call, "has_compiled", lambda: False)
    types = frozenset((Model,))
    (arm,) = propose(context(module_calls=(called(),), outermost_types=types))
    assert (arm.label, arm.suspicion) == (f"batched-call {arm.place}", 0.4)
    phases = {"forward": 0.4, "backward": 0.2}
    (arm,) = propose(context(module_calls=(called(),), outermost_types=types, phases_s=phases))
    assert arm.suspicion == pytest.approx(0.6)  # its backward pass goes with it
    for changes in ({"rows": 2}, {"calls_per_step": 2.0}, {"has_parameters": False}, {"host_s": 0.01}):
        assert not list(propose(context(module_calls=(called(**changes),), outermost_types=types)))
    assert not list(propose(context(module_calls=(called(module="LSTM"),), outermost_types=types)))
    monkeypatch.setattr(batched_call, "has_compiled", lambda: True)
    (arm,) = propose(context(module_calls=(called(),), outermost_types=types))
    assert arm.refusal == COMPILED
