from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flatout.measure.arms.switches import checkpointing
from flatout.measure.arms.switches.checkpointing import NEEDED, NoCheckpointing, propose
from flatout.measure.evidence import Memory, Place, Site

HERE = Place(file="train.py", line=3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_functions_run_once_under_the_arm_and_twice_without_it(reentrant: bool) -> None:
    calls = []

    def double(x: Any) -> Any:
        calls.append(1)
        return x.tanh() * 2

    def gradient() -> Any:
        x = torch.ones(3, requires_grad=True)
        checkpoint(double, x, use_reentrant=reentrant).sum().backward()
        return x.grad

    before = gradient()
    assert len(calls) == 2
    arm = NoCheckpointing(suspicion=0.3, place=HERE)
    arm.begin()
    assert torch.equal(gradient(), before)
    assert len(calls) == 3
    arm.end()
    gradient()
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("peak", "refusal"), [(10, None), (20, NEEDED), (None, "peak memory was not measured")]
)
def test_memory_that_may_need_the_checkpoints_refuses_the_arm(
    context: Any, monkeypatch: pytest.MonkeyPatch, peak: int | None, refusal: str | None
) -> None:
    monkeypatch.setattr(checkpointing, "memory_bytes", lambda device: 100)
    site = Site(kind="call", op="checkpoint", place=HERE, via=None, calls_per_step=6.0)
    memory = Memory(num_steps=4, peak_bytes=peak, growth_bytes_per_step=0.0)
    (arm,) = propose(context(sites=(site,), memory=memory))
    assert (arm.refusal, arm.place) == (refusal, HERE)
    assert not list(propose(context(sites=(site,))))
    assert not list(propose(context(memory=memory)))


def test_the_memory_of_the_host_is_known() -> None:
    assert checkpointing.memory_bytes("cpu") > 2**20
