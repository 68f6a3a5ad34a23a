"""A compiled model is traced eagerly, and the trace says that it was compiled."""

from __future__ import annotations

import torch
from torch import nn

from flatout.memory.jobs.from_objects import job_of
from flatout.memory.jobs.job import Job
from tests.support.memory import traced


def job(model: nn.Module) -> Job:
    return job_of(model, torch.ones(8, 16), loss=lambda net, x: net(x).square().mean())


def test_a_compiled_model_is_traced_eagerly_and_said() -> None:
    plain = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    in_place = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    in_place[0].compile()
    eager = traced(job(plain))
    for model in (torch.compile(plain), in_place):
        found = traced(job(model))
        assert found.leans_on == ("eager",)
        assert found.events.tolist() == eager.events.tolist()
    assert eager.leans_on == ()
