from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.examine import examine
from flatout.doctor.rules.loading.slow_samples import detect, explains_samples
from flatout.measure.evidence import FetchLine


def fetching(made, *lines, wait_share=0.6, cached=2.5, **changes):
    return made.evidence(
        steps=made.steps(wait_share=wait_share),
        loaders=(made.loader(lines=lines, num_workers=2, **changes),),
        counterfactuals=(made.counterfactual("cached", cached),),
    )


def line(made, number, samples, *, function="Samples.__getitem__", in_collate=False):
    place = None if number is None else made.place(number, function=function)
    return FetchLine(place=place, in_collate=in_collate, samples=samples)


def test_the_function_that_holds_most_is_named_at_its_heaviest_line(made):
    lines = (
        line(made, 7, 35, function="collate", in_collate=True),
        line(made, 20, 30),
        line(made, 21, 25),
        line(made, None, 10),
    )
    (finding,) = detect(fetching(made, *lines))
    assert (finding.code, finding.name) == ("FO106", "slow-samples")
    assert finding.place.line == 20
    assert finding.share == pytest.approx(0.6 * 0.55)
    assert finding.ceiling.speedup == pytest.approx(1 / (1 - 0.33))  # no more than its share of the wait
    assert "55 of 100 samples" in finding.evidence[0]


def test_workers_that_share_the_cores_with_the_step_hold_more_than_the_wait(made):
    job = fetching(made, line(made, 20, 100), wait_share=0.3, cached=5.0, cpu_s=100.0)
    (finding,) = detect(job)
    assert (finding.share, finding.ceiling.speedup) == (pytest.approx(0.3), pytest.approx(5.0))


def test_lines_of_batches_that_are_ready_in_time_are_not_waited_for(made):
    late = {"wait_s": made.spread(0.06), "late_s": 0.05}
    (finding,) = detect(fetching(made, line(made, 20, 100), **late))
    assert finding.share == pytest.approx(0.6 * 5 / 6)
    assert detect(fetching(made, line(made, 20, 100), **{**late, "late_s": 0.0})) == []


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("transformers", "tokenise once"),
        ("PIL", "decode at the size"),
        ("numpy", "do this once"),
        (None, "do this"),
    ],
)
def test_the_fix_follows_from_the_library_that_the_line_calls(made, library, words):
    lines = (line(made, 20, 10), dataclasses.replace(line(made, 20, 80), library=library))
    (finding,) = detect(fetching(made, *lines))
    assert finding.fix.startswith(words)


def test_the_whole_function_is_what_is_left_out(made):
    """Its share is the function's, so the ceiling is not that of one of its lines."""
    function = made.place(18, function="Samples.__getitem__")
    whole = made.counterfactual("knock-out", 2.2, line=18, last_line=24, place=function)
    part = made.counterfactual(
        "knock-out", 1.4, line=20, last_line=21, place=dataclasses.replace(function, line=20)
    )
    job = fetching(made, line(made, 20, 60), line(made, 23, 40))
    (finding,) = detect(dataclasses.replace(job, counterfactuals=(*job.counterfactuals, part, whole)))
    assert (finding.place.line, finding.ceiling.speedup) == (20, pytest.approx(2.2))


@pytest.mark.parametrize(("wait_share", "fires"), [(0.24, True), (0.22, False)])
def test_it_must_be_worth_a_third_of_the_speed(made, wait_share, fires):
    assert bool(detect(fetching(made, line(made, 20, 100), wait_share=wait_share))) == fires


def test_look_alikes(made):
    assert detect(fetching(made)) == []
    assert detect(fetching(made, line(made, None, 100))) == []
    assert detect(fetching(made, line(made, 20, 10))) == []  # thin evidence
    assert detect(fetching(made, line(made, 20, 100), cached=1.0)) == []
    assert detect(fetching(made, line(made, 20, 100), trains=False)) == []


def test_a_rule_that_knows_the_cause_speaks_for_the_function(made):
    job = fetching(
        made,
        line(made, 22, 100, function="collate", in_collate=True),
        collate_s=made.spread(0.05),
        fetch_s=made.spread(0.001),
        calls=(made.call("numpy.pad", calls_per_batch=32.0),),
    )
    assert [finding.code for finding in detect(job)] == ["FO106"]
    assert [finding.code for finding in examine(job)] == ["FO103"]
    silent = dataclasses.replace(job, loaders=(dataclasses.replace(job.loaders[0], calls=()),))
    assert [finding.code for finding in examine(silent)] == ["FO106"]


def test_a_part_of_the_function_that_nothing_proves_does_not_speak_for_it(made):
    (samples,) = detect(fetching(made, line(made, 20, 100)))
    part = dataclasses.replace(samples, code="FO301", ceiling=None, share=0.2)
    assert not explains_samples(samples, part)
    assert explains_samples(samples, dataclasses.replace(part, share=samples.share))
    assert explains_samples(samples, dataclasses.replace(part, ceiling=samples.ceiling))


def test_a_loader_that_more_workers_make_faster_is_a_finding_beside_its_line(made):
    job = fetching(made, line(made, 20, 100))
    assert [finding.code for finding in examine(job)] == ["FO106"]
    workers = made.counterfactual("workers", 1.8, value=4.0)
    helped = dataclasses.replace(job, counterfactuals=(*job.counterfactuals, workers))
    assert sorted(finding.code for finding in examine(helped)) == ["FO105", "FO106"]
