from __future__ import annotations

import pytest

from flatout.doctor.examine import examine
from flatout.doctor.rules.loading.too_many_workers import detect


def job(made, *arms, num_workers=16):
    return made.evidence(
        steps=made.steps(wait_share=0.5),
        loaders=(made.loader(num_workers=num_workers),),
        counterfactuals=(made.counterfactual("cached", 2.0), *arms),
    )


def test_fewer_workers_that_are_faster_are_named(made):
    (finding,) = examine(job(made, made.counterfactual("workers", 1.9, value=1.0)))
    assert (finding.code, finding.place, finding.ceiling.speedup) == ("FO107", made.place(10), 1.9)
    assert finding.fix == "give this DataLoader num_workers=1"
    (finding,) = detect(job(made, made.counterfactual("workers", 1.9, value=0.0)))
    assert finding.message == "16 workers make the step slower than none would"


@pytest.mark.parametrize(("speedup", "value", "num_workers"), [(1.04, 1.0, 16), (1.9, 4.0, 2), (1.9, 4.0, 0)])
def test_look_alikes(made, speedup, value, num_workers):
    arm = made.counterfactual("workers", speedup, value=value)
    assert detect(job(made, arm, num_workers=num_workers)) == []
