from __future__ import annotations

import pytest

from flatout.doctor.examine import examine
from flatout.doctor.rules.waits.logging_every_step import detect
from flatout.measure.evidence import StackPath, Stacks, Step


def job(made, *arms, library="logging", text="log.info(loss)", samples=60, rest_s=0.06):
    step = Step(index=0, arm="real", block=0, step_s=0.1, phases_s={"rest": rest_s, "forward": 0.1 - rest_s})
    line = made.place(30)
    stacks = Stacks(
        num_steps=4,
        samples_by_phase={"rest": 100},
        paths=(StackPath(phase="rest", places=(line,), samples=samples, library=library),),
    )
    sources = {"train.py": {"30": text}}
    return made.evidence(steps=(step,), stacks=stacks, sources=sources, counterfactuals=arms)


@pytest.mark.parametrize(
    ("library", "text"),
    [
        ("logging", "log.info(loss)"),
        ("torch/utils/tensorboard", "writer.add_scalar('loss', loss, step)"),
        (None, "    print(step, loss)"),
        ("torch", "print(weights)"),
    ],
)
def test_what_logs_is_found_at_the_users_line(made, library, text):
    arm = made.counterfactual("knock-out", 1.5, line=30)
    (finding,) = examine(job(made, arm, library=library, text=text))
    assert (finding.code, finding.place, finding.ceiling.speedup) == ("FO204", made.place(30), 1.5)


def test_a_line_that_cannot_be_left_out_is_found_without_a_ceiling(made):
    (finding,) = detect(job(made))
    assert finding.ceiling is None and finding.no_ceiling


def test_look_alikes(made):
    arm = made.counterfactual("knock-out", 1.5, line=30)
    assert detect(job(made, arm, library="numpy", text="blueprint(loss)")) == []
    assert detect(job(made, arm, library=None, text="self.print(loss)")) == []
    assert detect(job(made, arm, samples=6)) == []
    assert detect(job(made, samples=10)) == []  # too few looks where nothing was left out
    assert detect(job(made, made.counterfactual("knock-out", 1.0, line=30))) == []
    assert detect(made.evidence()) == []
