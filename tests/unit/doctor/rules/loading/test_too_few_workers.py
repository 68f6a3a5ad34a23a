from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.loading.too_few_workers import detect


def waiting(made, *, workers=1.8, value=6.0, wait_share=0.6, num_workers=2, **changes):
    arm = made.counterfactual("workers", workers, value=value)
    return made.evidence(
        steps=made.steps(wait_share=wait_share),
        loaders=(made.loader(num_workers=num_workers, **changes),),
        counterfactuals=(arm,),
    )


def test_fires_at_the_loader_with_the_number_that_was_run(made):
    (finding,) = detect(waiting(made))
    assert (finding.code, finding.name) == ("FO106", "too-few-workers")
    assert finding.place == made.place(10)
    assert (finding.ceiling.kind, finding.ceiling.speedup) == ("workers", pytest.approx(1.8))
    assert "num_workers=6" in finding.fix


def test_of_several_numbers_the_fastest_is_advised(made):
    job = waiting(made)
    more = made.counterfactual("workers", 2.2, value=8.0, label="workers=8")
    (finding,) = detect(dataclasses.replace(job, counterfactuals=(*job.counterfactuals, more)))
    assert "num_workers=8" in finding.fix


@pytest.mark.parametrize(
    "changes",
    [
        {"num_workers": 0},
        {"num_workers": 8},  # fewer are faster: then workers are not what is missing
        {"trains": False},
        {"wait_share": 0.05},
        {"workers": 1.06},
    ],
)
def test_look_alikes(made, changes):
    assert detect(waiting(made, **changes)) == []
    assert (
        detect(made.evidence(loaders=(made.loader(num_workers=2),), steps=made.steps(wait_share=0.6))) == []
    )
