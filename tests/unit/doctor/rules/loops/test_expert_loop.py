from __future__ import annotations

import pytest

from flatout.doctor.rules.loops.expert_loop import detect
from flatout.measure.evidence import InnerCalls, StackPath, Stacks


def job(made, *arms, samples=100, loops=(28,), **changes):
    place = made.place(30, function="Mixture.forward")
    calls = {
        "module": "Expert",
        "place": place,
        "calls_per_step": 64.0,
        "num_modules": 8,
        "rows_differ": True,
    }
    path = StackPath(phase="forward", places=(made.place(40), place), samples=samples)
    stacks = Stacks(
        num_steps=4,
        samples_by_phase={"forward": 200},
        paths=(path,),
        loops={str(place): loops} if loops else {},
    )
    return made.evidence(
        inner_calls=(InnerCalls(**{**calls, **changes}),), stacks=stacks, counterfactuals=arms
    )


def test_fires_at_the_line_that_calls_the_experts(made):
    (finding,) = detect(job(made, made.counterfactual("knock-out", 2.0, line=30)))
    assert (finding.code, finding.place.line) == ("FO308", 30)
    assert finding.share == pytest.approx(0.5)  # with the backward pass, which no sample of the line shows
    assert finding.ceiling.speedup == pytest.approx(2.0)
    (unproven,) = detect(job(made))
    assert (unproven.share, unproven.ceiling) == (pytest.approx(0.2), None)


@pytest.mark.parametrize(
    "change", [{"rows_differ": False}, {"num_modules": 3}, {"loops": ()}, {"samples": 10}]
)
def test_look_alikes(made, change):
    """Layers of a network see the same rows; a part of an expert is in no loop of its own."""
    assert detect(job(made, **change)) == []
