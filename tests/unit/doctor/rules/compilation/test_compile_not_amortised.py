from __future__ import annotations

import pytest

from flatout.doctor.examine import examine
from flatout.doctor.rules.compilation.compile_not_amortised import detect
from flatout.measure.evidence import Compilation, CompiledFunction, GraphBreak


def job(made, *arms, compile_s=30.0, breaks=()):
    function = CompiledFunction(
        function="forward",
        place=None,
        num_compiled=1,
        num_recompiled=0,
        compile_s=compile_s,
        late_s=0.0,
        num_late_steps=0,
        reasons=(),
        gave_up=False,
    )
    compilation = Compilation(functions=(function,), breaks=breaks, num_steps=40, steps_s=4.0)
    return made.evidence(compilation=compilation, module_calls=(made.module_call(),), counterfactuals=arms)


def test_fires_where_the_job_is_faster_as_it_was_written(made):
    (finding,) = detect(job(made, made.counterfactual("uncompiled", 1.7)))
    assert (finding.code, finding.place.line) == ("FO603", 40)
    assert finding.ceiling.speedup == pytest.approx(1.7)


def test_fires_where_an_hour_does_not_pay_for_it(made):
    arm = made.counterfactual("uncompiled", 0.995, width=0.002)  # compiled steps save 0.7 % at the most
    (finding,) = detect(job(made, arm, compile_s=60.0))
    assert finding.ceiling is None and "more than an hour" in finding.message
    assert detect(job(made, arm, compile_s=20.0)) == []


def test_look_alikes(made):
    assert detect(job(made)) == []
    assert detect(job(made, made.counterfactual("uncompiled", 0.5))) == []
    assert detect(made.evidence(counterfactuals=(made.counterfactual("uncompiled", 1.7),))) == []


def test_a_graph_break_is_the_cause_where_there_is_one(made):
    found = GraphBreak(place=made.place(31), reason="a clock", times=1)
    findings = examine(job(made, made.counterfactual("uncompiled", 1.7), breaks=(found,)))
    assert [finding.code for finding in findings] == ["FO602"]
