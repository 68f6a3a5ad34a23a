from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.measure.evidence import ModuleCall
from flatout.measure.lines.module_calls import ModuleCalls, active_autocast
from flatout.measure.user_code import UserCode

HERE = Path(__file__)


@pytest.fixture
def calls() -> ModuleCalls:
    return ModuleCalls(UserCode(str(HERE.parent)))


def note(
    calls: ModuleCalls,
    module: nn.Module,
    *args: Any,
    spent_s: float = 0.5,
    result: Any = None,
    **kwargs: Any,
) -> None:
    """One outermost call, noted as if made by the line that calls this."""
    calls.note(module, args, kwargs, result, sys._getframe(1), spent_s)


def only(calls: ModuleCalls) -> ModuleCall:
    (found,) = calls.evidence()
    return found


def test_calls_of_one_line_are_summed_per_step(calls: ModuleCalls) -> None:
    model = nn.Linear(3, 2)
    for _ in range(8):
        note(calls, model, torch.zeros(1, 3), spent_s=0.25)
        last = sys._getframe().f_lineno - 1
    calls.num_steps = 2
    found = only(calls)
    assert (found.module, found.place.file, found.place.line) == ("Linear", HERE.name, last)
    assert (found.calls_per_step, found.rows, found.host_s) == (4, 1, 1.0)
    assert found.training
    assert found.has_parameters


def test_a_vector_of_floats_is_one_sample_and_one_of_indices_a_batch(calls: ModuleCalls) -> None:
    note(calls, nn.Linear(3, 2), torch.zeros(3))
    note(calls, nn.Embedding(3, 2), torch.zeros(3, dtype=torch.long))
    assert {call.module: call.rows for call in calls.evidence()} == {"Linear": 1, "Embedding": 3}


def test_rows_that_vary_are_unknown(calls: ModuleCalls) -> None:
    for rows in (4, 5):
        note(calls, nn.Linear(3, 2), torch.zeros(rows, 3))
    assert only(calls).rows is None


def test_rows_are_those_of_the_first_tensor_wherever_it_stands(calls: ModuleCalls) -> None:
    note(calls, nn.Identity(), "name", torch.tensor(1.0), x=torch.zeros(7, 2))
    found = only(calls)
    assert found.rows == 7
    assert not found.has_parameters


def test_a_model_in_eval_is_not_training(calls: ModuleCalls) -> None:
    note(calls, nn.Linear(3, 2).eval(), torch.zeros(4, 3))
    assert not only(calls).training


def test_different_lines_and_modules_are_kept_apart(calls: ModuleCalls) -> None:
    note(calls, nn.Linear(3, 2), torch.zeros(4, 3))
    note(calls, nn.Linear(3, 2), torch.zeros(4, 3))
    for module in (nn.Linear(3, 2), nn.Identity()):
        note(calls, module, torch.zeros(4, 3))
    assert [call.calls_per_step for call in calls.evidence()] == [1, 1, 1, 1]


def test_autocast_is_seen_where_it_is_on(calls: ModuleCalls) -> None:
    assert active_autocast() is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        note(calls, nn.Linear(3, 2), torch.zeros(4, 3))
        assert active_autocast() == "bfloat16"
    assert only(calls).autocast == "bfloat16"


def test_gradients_that_nobody_uses_are_told(calls: ModuleCalls) -> None:
    x = torch.ones(4, 3)
    student, teacher, unread = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    kinds = {}
    for kind, model in (("Student", student), ("Teacher", teacher), ("Unread", unread)):
        model.__class__ = type(kind, (nn.Linear,), {})
        kinds[kind] = model(x)
        note(calls, model, x, result=kinds[kind])
    (kinds["Student"] - kinds["Teacher"]).sum().backward()
    optimizer = torch.optim.SGD([*student.parameters(), *unread.parameters()])
    found = {call.module: call.unused_gradients for call in calls.evidence([optimizer])}
    assert found == {"Student": False, "Teacher": True, "Unread": True}


def test_inputs_that_need_gradients_are_somebodys_wish(calls: ModuleCalls) -> None:
    judge, x = nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True)
    note(calls, judge, x, result=judge(x))
    (found,) = calls.evidence([torch.optim.SGD(nn.Linear(1, 1).parameters())])
    assert not found.unused_gradients


def test_what_is_recorded_inside_a_transform_is_used(calls: ModuleCalls) -> None:
    """Without gradients inside it, `torch.func.grad` returns zeros."""
    base, x = nn.Linear(3, 2), torch.ones(4, 3)
    weights = {name: each.detach().requires_grad_() for name, each in base.named_parameters()}

    def loss_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(base, weights, (x,))
        note(calls, base, x, result=out)
        return out.sum()

    torch.func.grad(loss_of)(weights)
    (found,) = calls.evidence([torch.optim.SGD(weights.values())])
    assert not found.unused_gradients


def test_models_alike_are_counted_where_none_feeds_another(calls: ModuleCalls) -> None:
    members, x = [nn.Linear(3, 3) for _ in range(5)], torch.ones(4, 3)
    for member in members:
        note(calls, member, x, result=member(x))
    assert only(calls).num_alike == 5
    chained = ModuleCalls(calls.user_code)
    for member in members:
        before, x = x, member(x)
        note(chained, member, before, result=x)
    assert only(chained).num_alike == 1
    mixed = ModuleCalls(calls.user_code)
    for member in (nn.Linear(3, 2), nn.Linear(3, 3)):
        note(mixed, member, torch.ones(4, 3))
    assert only(mixed).num_alike == 1


def evaluated(calls: ModuleCalls, *, backward: bool = False, grown: bool = False) -> list[bool]:
    """A model that trains, and is called once more in evaluation mode."""
    model, x = nn.Linear(3, 1), torch.ones(2, 3, requires_grad=grown)
    trained = model(torch.ones(2, 3))
    note(calls, model, torch.ones(2, 3), result=trained)
    trained.sum().backward()
    model.eval()
    again = model(x)
    note(calls, model, x, result=again)
    if backward:
        again.sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    return [call.evaluates for call in calls.evidence([optimizer])]


def test_a_model_that_trains_and_is_called_in_evaluation_mode_is_evaluated(calls: ModuleCalls) -> None:
    assert evaluated(calls) == [False, True]


@pytest.mark.parametrize("fields", [{"backward": True}, {"grown": True}])
def test_a_call_whose_gradients_are_used_is_no_evaluation(
    calls: ModuleCalls, fields: dict[str, bool]
) -> None:
    assert evaluated(calls, **fields) == [False, False]
