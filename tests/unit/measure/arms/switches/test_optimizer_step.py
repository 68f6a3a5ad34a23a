from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.measure.arms.switches.optimizer_step import (
    FOREACH,
    FUSED,
    MERGED,
    OptimizerStep,
    describe,
    merged,
    propose,
)
from flatout.measure.evidence import Place

HERE = Place(file="train.py", line=3)


def parameters(number: int = 12) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3)) for _ in range(number)]


def one_each(tensors: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [each], "weight_decay": 0.1 * (number % 2)} for number, each in enumerate(tensors)]


def step(optimizer: torch.optim.Optimizer, tensors: list[torch.nn.Parameter]) -> None:
    for tensor in tensors:
        tensor.grad = tensor.detach().clone()
    optimizer.step()


@pytest.mark.parametrize("kind", [MERGED, FOREACH, FUSED])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_other_ways_compute_the_same_and_leave_the_groups_alone(kind: str, make: Any) -> None:
    own, other = parameters(), parameters()
    plain, changed = (make(one_each(tensors), lr=0.1, foreach=False) for tensors in (own, other))
    arm = OptimizerStep([changed], kind=kind, suspicion=0.5)
    groups = changed.param_groups
    scheduler = torch.optim.lr_scheduler.StepLR(changed, 1)  # it wraps step, and counts groups
    step(plain, own)
    step(changed, other)
    arm.begin()
    for _ in range(3):
        step(plain, own)
        step(changed, other)
    assert changed.param_groups is groups
    arm.end()
    step(plain, own)
    step(changed, other)
    scheduler.step()
    assert changed.param_groups is groups and not changed._optimizer_step_pre_hooks
    assert all(not group.get("fused") for group in groups)
    for mine, theirs in zip(own, other, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_groups_are_merged_while_the_step_runs() -> None:
    tensors, seen = parameters(), []
    optimizer = torch.optim.SGD(one_each(tensors), lr=0.1)
    arm = OptimizerStep([optimizer], kind=MERGED, suspicion=0.5)
    arm.begin()
    optimizer.register_step_pre_hook(lambda *_: seen.append(len(optimizer.param_groups)))
    step(optimizer, tensors)
    arm.end()
    step(optimizer, tensors)
    assert seen == [2, 12]


def test_a_step_that_raises_gives_the_groups_back_at_the_end() -> None:
    tensors = parameters()
    optimizer = torch.optim.SGD(one_each(tensors), lr=0.1)
    groups = optimizer.param_groups
    arm = OptimizerStep([optimizer], kind=MERGED, suspicion=0.5)
    arm.begin()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    arm.end()
    assert optimizer.param_groups is groups


def test_only_options_of_the_optimizer_keep_groups_apart() -> None:
    rate = torch.tensor(0.1)
    groups = [
        {"params": [1], "lr": rate, "name": "a"},
        {"params": [2], "lr": rate, "name": "b"},
        {"params": [3], "lr": torch.tensor(0.1), "name": "c"},
    ]
    assert [group["params"] for group in merged(groups, ("lr",))] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({}, "default"),
        ({"foreach": False}, "for-loop"),
        ({"foreach": True}, "foreach"),
        ({"fused": True}, "fused"),
    ],
)
def test_the_way_of_an_optimizer(options: dict[str, Any], way: str) -> None:
    found = describe(torch.optim.Adam(one_each(parameters()), **options), HERE)
    assert (found.way, found.num_groups, found.num_distinct, found.num_tensors) == (way, 12, 2, 12)
    assert (found.name, found.place) == ("Adam", HERE)


def test_an_optimizer_of_the_users_own_has_no_way() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    assert describe(Own(parameters()), None).way is None


def test_arms_are_proposed_where_the_optimizer_takes_a_share(context: Any) -> None:
    looped = torch.optim.AdamW(one_each(parameters()), foreach=False)
    found = list(propose(context(optimizers=(looped,), phases_s={"optimizer": 0.5}, made_at=lambda _: HERE)))
    assert [arm.kind for arm in found] == [MERGED, FUSED, FOREACH]
    assert found[0].place == HERE and found[0].suspicion == pytest.approx(0.4)
    assert not list(propose(context(optimizers=(looped,), phases_s={"optimizer": 0.04})))
    plain = torch.optim.AdamW(parameters())
    assert not list(propose(context(optimizers=(plain,), phases_s={"optimizer": 0.5})))
