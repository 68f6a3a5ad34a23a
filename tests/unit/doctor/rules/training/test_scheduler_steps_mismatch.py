from __future__ import annotations

import pytest

from flatout.doctor.rules.training.scheduler_steps_mismatch import detect
from flatout.measure.evidence import Losses, RateSchedule, Training


def job(made, *, horizon=20, num_steps=60, num_batches=256):
    schedule = RateSchedule(
        name="CosineAnnealingLR",
        argument="T_max",
        place=made.place(80),
        horizon=horizon,
        num_steps=num_steps,
        num_optimizer_steps=60,
    )
    training = Training(losses=Losses(num=4, num_not_finite=0), schedules=(schedule,))
    return made.evidence(training=training, loaders=(made.loader(num_batches=num_batches),))


def test_epochs_that_are_counted_in_batches_are_found_where_the_schedule_is_made(made):
    (finding,) = detect(job(made))
    assert (finding.code, finding.place) == ("FO903", made.place(80))
    assert "CosineAnnealingLR(T_max=20) is stepped in every batch" in finding.message


@pytest.mark.parametrize(
    "changes", [{"horizon": 5120}, {"num_steps": 2}, {"num_batches": 20}, {"num_batches": None}]
)
def test_look_alikes(made, changes):
    assert detect(job(made, **changes)) == []
