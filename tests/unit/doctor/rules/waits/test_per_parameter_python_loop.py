from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.doctor.examine import examine
from flatout.doctor.rules.waits.per_parameter_python_loop import detect
from flatout.measure.evidence import StackPath, Stacks, Step


def job(made, *arms, text="    for a, p in zip(average.parameters(), model.parameters()):"):
    step = Step(index=0, arm="real", block=0, step_s=0.1, phases_s={"rest": 0.06, "forward": 0.04})
    line = made.place(31, function="follow")
    stacks = Stacks(
        num_steps=4,
        samples_by_phase={"rest": 100},
        paths=(StackPath(phase="rest", places=(made.place(50), line), samples=60),),
        loops={str(line): (30,), str(made.place(50)): (40,)},
    )
    header = {str(30 + number): line for number, line in enumerate(text.splitlines())}
    sources = {"train.py": {**header, "40": "for batch in loader:"}}
    return made.evidence(steps=(step,), stacks=stacks, sources=sources, counterfactuals=arms)


@pytest.mark.parametrize(
    "text",
    [
        "    for a, p in zip(average.parameters(), model.parameters()):",
        "for name, p in model.named_parameters():",
        "for a, p in zip(  # both\n    average.parameters(), model.parameters()\n):",
        "for group in optimizer.param_groups:",
        "for key, value in model.state_dict().items():",
    ],
)
def test_a_loop_over_parameters_is_found_at_its_first_line(made, text):
    arm = made.counterfactual("knock-out", 1.8, line=30, last_line=31)
    (finding,) = examine(job(made, arm, text=text))
    assert (finding.code, finding.ceiling.speedup) == ("FO205", 1.8)
    assert finding.place == made.place(30, function="follow")


def test_copies_inside_the_loop_are_the_loop(made):
    arm = made.counterfactual("knock-out", 1.8, line=30, last_line=31)
    evidence = job(made, arm)
    copies = made.site("weights", line=31, op="copy_", bytes_per_step=1024.0)
    (finding,) = examine(replace(evidence, sites=(copies,)))
    assert (finding.code, finding.also) == ("FO205", ())


def test_look_alikes(made):
    arm = made.counterfactual("knock-out", 1.8, line=30, last_line=31)
    assert detect(job(made, arm, text="for error in errors.tolist():\n    model.parameters()")) == []
    assert detect(job(made, made.counterfactual("knock-out", 1.0, line=30, last_line=31))) == []
    assert detect(made.evidence()) == []
