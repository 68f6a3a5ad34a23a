from __future__ import annotations

from flatout.doctor.rules.training.dead_parameters import detect
from flatout.measure.evidence import Losses, Training, Untrained


def job(made, num_steps, num=3):
    untrained = Untrained(
        module="Model", place=made.place(70), names=("head.weight",), num=num, num_steps=num_steps
    )
    losses = Losses(num=4, num_not_finite=0)
    return made.evidence(training=Training(losses=losses, untrained=(untrained,)))


def test_parameters_without_a_gradient_are_named(made):
    (finding,) = detect(job(made, 40))
    assert (finding.code, finding.place) == ("FO902", made.place(70))
    assert finding.message == "3 parameters of Model never got a gradient"
    assert finding.evidence == ("in 40 steps: head.weight and 2 more",)


def test_one_parameter_is_one(made):
    (finding,) = detect(job(made, 40, num=1))
    assert finding.message == "1 parameter of Model never got a gradient"


def test_a_few_steps_are_not_enough(made):
    assert detect(job(made, 7)) == []
    assert detect(made.evidence()) == []
