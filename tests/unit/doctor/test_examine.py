from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.examine import Diagnosis, _led, examine
from flatout.measure.evidence import Host


def test_a_healthy_job_has_no_findings(made):
    for device in ("cpu", "cuda"):
        job = made.evidence(
            device=device,
            loaders=(made.loader(),),
            module_calls=(made.module_call(),),
            kernels=made.kernels(),
            counterfactuals=(made.counterfactual("cached", 1.01), made.counterfactual("half", 1.8)),
        )
        assert examine(job) == ()


@pytest.mark.parametrize(("low", "codes"), [(1.04, ["FO403"]), (1.03, []), (None, [])])
def test_a_rule_that_needs_proof_is_silent_without_a_certain_gain(made, low, codes):
    """Its advice is another way to do the same work, which may be no faster here."""
    arm = dataclasses.replace(made.counterfactual("fused-optimizer", 1.2), speedup_low=low or 1.0)
    job = made.evidence(
        device="cuda",
        steps=made.steps(optimizer_s=0.02),
        optimizers=(made.optimizer(way="foreach"),),
        counterfactuals=(arm,) if low else (),
    )
    assert [finding.code for finding in examine(job)] == codes


def test_the_finding_that_frees_most_comes_first(made):
    job = made.evidence(
        sites=(
            made.site("create", line=1, host_s=0.01),
            made.site("row", line=2, host_s=0.10),
            made.site("create", line=3, host_s=0.04),
        )
    )
    findings = examine(job)
    assert [finding.place.line for finding in findings] == [2, 3, 1]
    assert [finding.code for finding in findings] == ["FO302", "FO301", "FO301"]


def test_equal_findings_are_ordered_by_code_and_line(made):
    job = made.evidence(
        sites=(
            made.site("create", line=9, host_s=0.02),
            made.site("row", line=1, host_s=0.02),
            made.site("create", line=2, host_s=0.02),
        )
    )
    assert [(finding.code, finding.place.line) for finding in examine(job)] == [
        ("FO301", 2),
        ("FO301", 9),
        ("FO302", 1),
    ]


def test_a_printed_diagnosis_is_its_findings_and_not_its_thousand_steps(made):
    job = made.evidence(
        steps=made.steps(wait_share=0.4),
        loaders=(made.loader(),),
        counterfactuals=(made.counterfactual("cached", 1.8),),
    )
    found = Diagnosis(evidence=job, findings=examine(job))
    lines = str(found).splitlines()
    assert lines[0].startswith("The loader limits the step")
    assert lines[2].startswith("FO101 single-process-loading  train.py:10  1.67×")
    assert lines[4] == f"  fix: {found.findings[0].fix}"
    assert len(lines) == 5
    assert str(Diagnosis(evidence=made.evidence(), findings=())).endswith("No findings.")


def test_findings_that_one_arm_proves_are_one(made):
    """Rows and creations of one loop: what the step takes without it is said once."""
    job = made.evidence(
        sites=(
            made.site("row", line=30, host_s=0.10),
            made.site("create", line=30, host_s=0.03),
            made.site("row", line=31, host_s=0.01),
            made.site("create", line=60, host_s=0.04),
        ),
        counterfactuals=(
            made.counterfactual("knock-out", 4.0, line=29, last_line=32),
            made.counterfactual("knock-out", 1.3, line=60),
        ),
    )
    first, second = examine(job)
    assert (first.code, first.place.line, first.ceiling.speedup) == ("FO302", 30, 4.0)
    assert [(other.code, other.place.line) for other in first.also] == [("FO301", 30), ("FO302", 31)]
    assert (second.code, second.place.line, second.also) == ("FO301", 60, ())


def test_two_sights_of_one_line_without_an_arm_are_one(made):
    job = made.evidence(
        sites=(
            made.site("row", line=30, host_s=0.10),
            made.site("create", line=30, host_s=0.03),
            made.site("create", line=31, host_s=0.03),
        )
    )
    first, second = examine(job)
    assert (first.code, first.place.line) == ("FO302", 30)
    assert [(other.code, other.place.line) for other in first.also] == [("FO301", 30)]
    assert (second.code, second.place.line, second.also) == ("FO301", 31, ())


def test_loaders_that_one_line_makes_with_growing_batches_are_one_finding(made):
    """A loader that is made anew in every epoch; no arm could run."""
    times = {"fetch_s": made.spread(0.02), "collate_s": made.spread(0.005)}
    loaders = tuple(made.loader(batch_size=size, wait_s=made.spread(0.03), **times) for size in (16, 32))
    host = Host(cores=4.0, memory_bytes=None)
    (found,) = examine(made.evidence(host=host, steps=made.steps(wait_share=0.6), loaders=loaders))
    assert (found.code, found.place, found.also) == ("FO101", made.place(10), ())


def test_a_line_is_named_once(made):
    """Two loaders of one dataset, or a function that two lines call."""
    (one,) = examine(made.evidence(sites=(made.site("row", line=31, host_s=0.1),)))
    other = dataclasses.replace(one, place=made.place(40), share=0.1)
    found = _led([one, dataclasses.replace(one, share=0.2), other, dataclasses.replace(other, share=0.3)])
    assert found.place == one.place
    assert [(each.place.line, each.share) for each in found.also] == [(40, 0.3)]


def test_findings_of_nested_blocks_are_one(made):
    job = made.evidence(
        sites=(made.site("row", line=30, host_s=0.10), made.site("row", line=35, host_s=0.03)),
        counterfactuals=(
            made.counterfactual("knock-out", 4.0, line=28, last_line=40),
            made.counterfactual("knock-out", 3.0, line=30, last_line=31),
        ),
    )
    (finding,) = examine(job)
    assert (finding.place.line, finding.ceiling.speedup) == (35, 4.0)
    assert [other.place.line for other in finding.also] == [30]


@pytest.mark.parametrize(("collate_s", "said"), [(0.03, ["FO101", "FO103"]), (0.055, ["FO103"])])
def test_a_line_that_makes_most_of_the_wait_is_the_cause_of_it(made, collate_s, said):
    loader = made.loader(
        collate_s=made.spread(collate_s), calls=(made.call("numpy.pad", calls_per_batch=32.0),)
    )
    job = made.evidence(
        steps=made.steps(wait_share=0.6),
        loaders=(loader,),
        counterfactuals=(made.counterfactual("cached", 2.0),),
    )
    assert [finding.code for finding in examine(job)] == said
