from __future__ import annotations

import pytest

from flatout.doctor.rules.waits.garbage_collector_pauses import detect
from flatout.measure.evidence import Garbage


def job(made, *arms, device="cpu", share=0.25, asked=True):
    garbage = Garbage(
        num_steps=20,
        steps_s=2.0,
        pauses_s=2.0 * share,
        num_paused=20,
        asked_s=2.0 * share if asked else 0.0,
        place=made.place(50) if asked else None,
    )
    return made.evidence(device=device, garbage=garbage, counterfactuals=arms)


def test_a_call_in_the_loop_is_found_at_its_line(made):
    (finding,) = detect(job(made, made.counterfactual("garbage-off", 1.3)))
    assert (finding.code, finding.place, finding.ceiling.speedup) == ("FO203", made.place(50), 1.3)
    assert "gc.collect() is called here" in finding.message


def test_rare_pauses_have_the_time_that_passed_as_their_ceiling(made):
    (finding,) = detect(job(made, asked=False))
    assert finding.place is None and finding.fix.startswith("freeze the collector")
    assert (finding.ceiling.speedup, finding.ceiling.job_speedup) == (1.0, pytest.approx(4 / 3))


def test_beside_a_gpu_time_that_passed_proves_nothing(made):
    (finding,) = detect(job(made, device="cuda"))
    assert finding.ceiling is None and finding.no_ceiling


def test_look_alikes(made):
    assert detect(job(made, share=0.04)) == []
    assert detect(job(made, made.counterfactual("garbage-off", 1.0))) == []
    assert detect(made.evidence()) == []
