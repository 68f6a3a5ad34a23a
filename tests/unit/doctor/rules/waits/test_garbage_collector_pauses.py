from __future__ import annotations

from dataclasses import replace

from flatout.doctor.finding import Ceiling
from flatout.doctor.rules.waits.garbage_collector_pauses import detect, explains_pauses
from flatout.measure.evidence import Garbage


def job(made, *arms, share=0.25, asked=True, num_paused=20):
    garbage = Garbage(
        num_steps=20,
        steps_s=2.0,
        pauses_s=2.0 * share,
        num_paused=num_paused,
        asked_s=2.0 * share if asked else 0.0,
        place=made.place(50) if asked else None,
    )
    return made.evidence(garbage=garbage, counterfactuals=arms)


def test_a_call_in_the_loop_is_found_at_its_line(made):
    (finding,) = detect(job(made, made.counterfactual("garbage-off", 1.3)))
    assert (finding.code, finding.place, finding.ceiling.speedup) == ("FO203", made.place(50), 1.3)
    assert "gc.collect() is called here" in finding.message


def test_what_cold_caches_cost_is_shown_where_somebody_asked(made):
    arm = made.counterfactual("garbage-off", 2.0)
    assert detect(job(made, arm))[0].ceiling.speedup == 2.0
    assert round(detect(job(made, arm, asked=False))[0].ceiling.speedup, 3) == 1.333


def test_rare_pauses_have_a_share_and_no_ceiling(made):
    (finding,) = detect(job(made, asked=False, num_paused=2))
    assert finding.place is None and finding.fix.startswith("freeze the collector")
    assert (finding.share, finding.ceiling) == (0.25, None) and finding.no_ceiling


def test_what_was_measured_to_cost_as_much_comes_first(made):
    (rare,) = detect(job(made, asked=False, num_paused=2))
    (called,) = detect(job(made, num_paused=2))
    other = replace(rare, code="FO108", ceiling=Ceiling(step_s=0.05, speedup=2.0))
    assert explains_pauses(rare, other) and not explains_pauses(called, other)
    assert not explains_pauses(rare, replace(other, ceiling=Ceiling(step_s=0.09, speedup=1.1)))


def test_pauses_of_every_step_that_nobody_asked_for_need_proof(made):
    assert detect(job(made, asked=False)) == []
    assert detect(job(made, made.counterfactual("garbage-off", 1.3), asked=False))


def test_look_alikes(made):
    assert detect(job(made, asked=False, num_paused=1)) == []
    assert detect(job(made, share=0.04)) == []
    assert detect(job(made, made.counterfactual("garbage-off", 1.0))) == []
    assert detect(made.evidence()) == []
