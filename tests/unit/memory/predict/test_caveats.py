from __future__ import annotations

import torch
from torch import nn

from flatout.hardware.simulated import simulated_device
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.predict.caveats import caveats_of
from flatout.memory.predict.forecast import Forecaster
from flatout.memory.trace.record import Trace

H200 = simulated_device("H200")


class Routed(nn.Module):
    """Rows of a mask are taken, or the two experts of most weight."""

    def __init__(self, *, choose: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.choose = choose

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weights = self.gate(rows)
        if not self.choose:
            return rows[weights[:, 0] > 0].sum() + weights.sum()
        _, chosen = weights.topk(2)
        return sum((rows[(chosen == number).any(1)].sum() for number in range(4)), weights.sum())


def trace(*, choose: bool) -> Trace:
    job = Job(
        name="routed",
        make_model=lambda: Routed(choose=choose),
        make_batch=lambda *, batch_size: torch.zeros(batch_size, 16),
        loss=lambda model, batch: model(batch),
        sizes={"batch_size": 8},
    )
    return Forecaster(job, device=H200).trace(Recipe(), {"batch_size": 8})


def test_a_choice_that_was_answered_evenly_is_a_doubt() -> None:
    (doubt,) = caveats_of(trace(choose=True).guesses, device=H200)
    assert doubt == "what is computed depends on data in a place (every choice equally often)"


def test_the_largest_answer_there_can_be_is_none() -> None:
    guesses = trace(choose=False).guesses
    assert guesses
    assert caveats_of(guesses, device=H200) == ()


def test_a_gpu_that_nobody_measured_is_one_unless_the_job_ran_there() -> None:
    for name, words in (
        ("A100-80GB", "have not been measured"),
        ("24GB", "which kernels run on 24GB is not"),
    ):
        (doubt,) = caveats_of((), device=simulated_device(name))
        assert words in doubt
    assert caveats_of((), device=None) == ()
