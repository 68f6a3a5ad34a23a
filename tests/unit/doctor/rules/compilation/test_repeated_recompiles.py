from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.compilation.repeated_recompiles import detect
from flatout.measure.evidence import Compilation, CompiledFunction


def compiling(made, **changes):
    fields = {
        "function": "forward",
        "place": made.place(12),
        "num_compiled": 6,
        "num_recompiled": 5,
        "compile_s": 3.0,
        "late_s": 1.0,
        "num_late_steps": 4,
        "reasons": ("self.num == 3",),
        "gave_up": False,
        **changes,
    }
    found = Compilation(functions=(CompiledFunction(**fields),), breaks=(), num_steps=40, steps_s=4.0)
    return made.evidence(compilation=found, module_calls=(made.module_call(),))


def test_compilations_in_the_steps_are_their_own_ceiling(made):
    (finding,) = detect(compiling(made))
    assert (finding.code, finding.name, finding.place) == ("FO601", "repeated-recompiles", made.place(12))
    assert finding.share == pytest.approx(0.25)
    assert finding.ceiling.speedup == pytest.approx(4 / 3)
    assert finding.ceiling.step_s == pytest.approx(0.075)
    assert finding.ceiling.job_speedup == pytest.approx(4 / 3)
    assert "a guard failed: self.num == 3" in finding.evidence


def test_steps_as_they_were_written_show_what_guards_cost_too(made):
    for speedup, shown in ((1.6, 1.6), (1.2, 4 / 3)):
        job = dataclasses.replace(
            compiling(made), counterfactuals=(made.counterfactual("uncompiled", speedup),)
        )
        assert detect(job)[0].ceiling.speedup == pytest.approx(shown)


def test_a_function_that_was_given_up_has_no_ceiling(made):
    (finding,) = detect(compiling(made, gave_up=True, num_compiled=8))
    assert "gave up on forward after 8 versions" in finding.message
    assert (finding.share, finding.ceiling) == (None, None)
    assert finding.no_ceiling


@pytest.mark.parametrize(
    "changes", [{"late_s": 0.19}, {"num_late_steps": 1}, {"late_s": 0.0, "num_late_steps": 0}]
)
def test_a_few_versions_in_warm_up_are_no_finding(made, changes):
    assert detect(compiling(made, **changes)) == []


def test_a_function_of_a_library_is_named_by_the_call_of_the_model(made):
    assert detect(compiling(made, place=None))[0].place == made.place(40)


def test_a_job_that_compiles_nothing_is_left_alone(made):
    assert detect(made.evidence()) == []
