"""What the reports say: differences only beyond the noise, and the cause that the figures name."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from flatout.doctor.finding import Ceiling
from flatout.doctor.rule import all_rules
from flatout.doctor.sentences import (
    ARMS,
    ended_early,
    instruments,
    phase_means,
    phase_shares,
    proof_words,
    read_arms,
    say_bound,
    short_of_time,
    show_ceiling,
    straggler,
    straggler_words,
    too_little,
    undecided,
)
from flatout.doctor.unexplained import unexplained
from flatout.measure import PHASES
from flatout.measure.evidence import ArmNotRun, Counterfactual, Evidence, Host, Step
from flatout.measure.run.step_blocks.schedule import NO_TIME
from tests.support import doctor as builders

ROOT = Path(__file__).resolve().parents[3]


def loading_bound(*, cores: float | None, **loader: object) -> Evidence:
    """The loader costs three quarters of the step; no planted line of it is at fault."""
    cached = dataclasses.replace(
        builders.counterfactuals()[0], speedup=4.0, speedup_low=2.8, speedup_high=5.7, step_s=0.0068
    )
    return builders.cpu_evidence(
        counterfactuals=(cached,),
        steps=waiting(0.7),
        host=Host(cores=cores, memory_bytes=None),
        loaders=(dataclasses.replace(builders.loader(), **loader),),  # type: ignore[arg-type]
    )


def test_a_loader_that_no_rule_explains_is_still_said_to_cost_time() -> None:
    assert unexplained(loading_bound(cores=2.0)) == "the loader costs 70 % of the step."


def test_a_loader_costs_what_its_arm_showed_or_both_figures_are_explained() -> None:
    """Beside 4.00× [2.80, 5.70] no smaller share stands alone: workers slow the step, too."""
    evidence = replace(loading_bound(cores=2.0, num_workers=1), steps=waiting(0.4))
    assert unexplained(evidence) == (
        "the step waits for the loader 40 % of its time, and is 75 % shorter without it: its workers share "
        "the cores with the step."
    )


def test_a_loader_that_the_step_hardly_waits_for_is_not_said_to_cost_so_much() -> None:
    words = unexplained(replace(loading_bound(cores=2.0), steps=waiting(0.005)))
    assert words is not None
    assert words.startswith("the step waits for the loader 0.5 % of its time, and is 75 % shorter without it")
    assert "share the cores" in words
    alone = replace(loading_bound(cores=2.0, num_workers=0), steps=waiting(0.005))
    assert "caches" in (unexplained(alone) or "")
    assert not say_bound(alone).startswith("The loader limits")


def test_workers_are_not_said_to_gain_more_than_the_step_waits() -> None:
    workers = replace(builders.counterfactuals()[0], kind="workers", label="workers 2", value=2.0)
    made = replace(workers, speedup=1.5, speedup_low=1.3, speedup_high=1.9)
    (reading,) = read_arms(replace(loading_bound(cores=2.0), counterfactuals=(made,), steps=waiting(0.04)))
    assert "costs at most 4 % of the step" in reading.words


def test_more_time_is_advised_than_did_not_suffice() -> None:
    """Seen on a crowded machine: 'try --seconds 60' after a diagnosis of 60 s."""
    late = ArmNotRun(kind="cached", label="cached", reason=NO_TIME)
    evidence = replace(
        builders.cpu_evidence(counterfactuals=(), arms_not_run=(late,), episodes=()), steps=quick_steps()
    )
    assert "try --seconds 60" in (short_of_time(evidence) or "")
    job = replace(evidence.job, limit_s=60.0)
    assert "try --seconds 120" in (short_of_time(replace(evidence, job=job)) or "")


def test_arms_that_could_not_tell_are_not_said_to_have_found_nothing() -> None:
    """Seen on a crowded machine: 'nothing costs time here' under three arms of up to 3.88x."""
    wide = replace(cached(0.9, 0.4, 3.88), kind="autocast", label="autocast")
    words = undecided(builders.cpu_evidence(counterfactuals=(wide, cached(1.0, 0.9, 1.2)))) or ""
    assert "with autocast on (at most 3.88×)" in words and "cached" not in words
    gains = replace(wide, speedup=2.0, speedup_low=1.4)
    assert undecided(builders.cpu_evidence(counterfactuals=(gains, replace(wide, kind="same")))) is None


def quick_steps() -> tuple[Step, ...]:
    return tuple(replace(step, step_s=0.03, phases_s={"forward": 0.03}) for step in builders.steps())


def test_a_batch_made_in_the_loop_costs_no_more_than_the_time_outside_the_model() -> None:
    """Seen on a crowded machine: 74 % of the step for one line, in a step of which 9 % lies outside."""
    made = replace(cached(3.83, 1.23, 21.6), place=builders.SYNC_LINE)
    evidence = builders.cpu_evidence(counterfactuals=(made,), steps=waiting(0.09))
    words = unexplained(evidence) or ""
    assert f"making the batch at {builders.SYNC_LINE} costs at most 9 % of the step" in words
    assert "noise" in words and "74 %" not in words
    (reading,) = read_arms(evidence)
    assert "74 %" not in reading.words
    outside = unexplained(replace(evidence, steps=waiting(0.8))) or ""
    assert outside == f"making the batch at {builders.SYNC_LINE} costs 74 % of the step."


def waiting(share: float) -> tuple[Step, ...]:
    """Steps that wait for their batch for `share` of their time."""
    phases = dict.fromkeys(PHASES, 0.0) | {"wait": share, "forward": 1 - share}
    return tuple(
        replace(step, phases_s={phase: part * step.step_s for phase, part in phases.items()})
        for step in builders.steps()
    )


def test_a_loader_inside_the_noise_is_not_blamed() -> None:
    assert unexplained(builders.cpu_evidence()) is None
    assert unexplained(builders.bare_evidence()) is None


def cached(speedup: float, low: float, high: float) -> Counterfactual:
    return dataclasses.replace(
        builders.counterfactuals()[0],
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        step_s=8.6 / speedup,
    )


def half(fraction: float, low: float, high: float) -> Counterfactual:
    return dataclasses.replace(
        builders.counterfactuals()[1], speedup=1 / fraction, speedup_low=1 / high, speedup_high=1 / low
    )


def words(found: Counterfactual, *, busy_share: float | None = None, device: str = "cuda") -> str:
    kernels = dataclasses.replace(builders.kernels(), busy_share=busy_share)
    evidence = builders.evidence(
        counterfactuals=(found,), kernels=kernels, job=builders.job(device=device), steps=waiting(0.5)
    )
    (reading,) = read_arms(evidence)
    return reading.words


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (cached(1.8, 1.6, 2.0), "the loader costs 44 % of the step"),
        (cached(1.02, 1.0, 1.04), "the loader is not the limit"),
        (cached(0.97, 0.95, 0.99), "the loader is not the limit"),
        (cached(1.2, 0.8, 1.6), "within the noise: this run cannot tell whether the loader is a limit"),
    ],
)
def test_cached_batches(found: Counterfactual, expected: str) -> None:
    assert words(found) == expected


@pytest.mark.parametrize(
    ("found", "busy_share", "device", "expected"),
    [
        (half(0.97, 0.95, 0.99), 0.1, "cuda", "bound by launches and the host, not by the GPU's arithmetic"),
        (half(0.99, 0.95, 1.03), 0.1, "cuda", "bound by launches and the host, not by the GPU's arithmetic"),
        (
            half(0.97, 0.95, 0.99),
            None,
            "cpu",
            "bound by work done once per step, not by arithmetic on the samples",
        ),
        (half(0.9, 0.7, 1.1), 0.1, "cuda", "within the noise: this run cannot tell what limits the step"),
        (half(0.52, 0.5, 0.55), 0.9, "cuda", "bound by the GPU's own work"),
        (half(0.52, 0.5, 0.55), None, "cpu", "bound by work that grows with the batch"),
        (
            half(0.52, 0.5, 0.55),
            0.1,
            "cuda",
            "bound by work per sample on the host: the GPU is busy for only 10 % of the step",
        ),
        (
            half(0.75, 0.7, 0.8),
            0.5,
            "cuda",
            "50 % of the step grows with the batch, the rest is paid once per step",
        ),
    ],
)
def test_half_a_batch(found: Counterfactual, busy_share: float | None, device: str, expected: str) -> None:
    assert words(found, busy_share=busy_share, device=device) == expected


def test_a_reading_is_a_fraction_with_its_interval_in_order() -> None:
    for reading in read_arms(builders.evidence()):
        assert reading.fraction_low < reading.fraction < reading.fraction_high
    assert [reading.label for reading in read_arms(builders.evidence())] == [
        "on cached batches",
        "on half the batch",
    ]
    assert read_arms(builders.evidence(counterfactuals=())) == ()
    assert read_arms(builders.evidence(counterfactuals=(cached(1.0, 0.0, 2.0),))) == ()


def busy(share: float | None) -> Evidence:
    return builders.evidence(kernels=dataclasses.replace(builders.kernels(), busy_share=share))


def spread_out() -> Evidence:
    """No phase takes more than half of the step."""
    shares = {"wait": 0.1, "transfer": 0.0, "forward": 0.2, "backward": 0.3, "optimizer": 0.0, "rest": 0.4}
    steps = tuple(
        dataclasses.replace(step, phases_s={phase: share * step.step_s for phase, share in shares.items()})
        for step in builders.evidence().steps
    )
    return builders.evidence(kernels=None, counterfactuals=(), steps=steps)


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (builders.bare_evidence(), "No step was measured."),
        (
            builders.evidence(counterfactuals=(cached(2.0, 1.9, 2.1),), steps=waiting(0.5)),
            "The loader limits the step: 8.62 s as it is, 4.31 s on cached batches.",
        ),
        (
            builders.evidence(counterfactuals=(cached(2.0, 1.9, 2.1),), steps=waiting(0.4)),
            "The loader limits the step: 8.62 s as it is, 5.17 s without its waits.",
        ),
        (busy(0.95), "The GPU limits the step: it is busy for 95 % of it."),
        (busy(0.118), "The host limits the step: the GPU is busy for 12 % of it and waits for the rest."),
        (busy(None), "Most of the step is backward: 57 %."),
        (builders.evidence(kernels=None), "Most of the step is backward: 57 %."),
        (spread_out(), "The largest part of the step is the rest, outside these phases: 40 %."),
    ],
)
def test_one_sentence_says_what_bounds_the_step(evidence: Evidence, expected: str) -> None:
    assert say_bound(evidence) == expected


def test_workers_that_compute_bound_the_step_by_the_cores_they_take() -> None:
    loader = dataclasses.replace(builders.evidence().loaders[0], num_workers=2, cpu_s=100.0, trains=True)
    job = builders.evidence(counterfactuals=(cached(2.0, 1.9, 2.1),), steps=waiting(0.1), loaders=(loader,))
    assert say_bound(job) == "The loader limits the step: 8.62 s as it is, 4.31 s on cached batches."


def test_a_loader_inside_the_noise_is_not_what_bounds_the_step() -> None:
    assert not say_bound(builders.evidence(counterfactuals=(cached(2.0, 0.9, 3.0),))).startswith("The loader")


def test_phases_are_means_of_the_kept_real_steps() -> None:
    evidence = builders.evidence()
    for phase in PHASES:
        assert phase_means(evidence)[phase] == pytest.approx(evidence.phase_s(phase))
    assert phase_means(evidence, device=True)["forward"] == pytest.approx(
        0.97 * phase_means(evidence)["forward"]
    )
    assert phase_means(builders.cpu_evidence(), device=True) == {}
    assert phase_shares(builders.bare_evidence()) == {}


@given(
    host=st.lists(st.floats(min_value=0, max_value=100), min_size=6, max_size=6),
    step_s=st.floats(min_value=1e-6, max_value=100),
)
def test_shares_never_exceed_the_step(host: list[float], step_s: float) -> None:
    step = dataclasses.replace(
        builders.steps()[7],
        arm="real",
        kept=True,
        step_s=step_s,
        phases_s=dict(zip(PHASES, host, strict=True)),
    )
    shares = phase_shares(builders.evidence(steps=(step,)))
    assert all(share >= 0 for share in shares.values())
    assert sum(shares.values()) <= 1 + 1e-9


def test_the_straggler_is_the_rank_with_more_work_of_its_own() -> None:
    ranks = builders.ranks()
    found = straggler(ranks)
    assert found is not None
    assert found[0].rank == 1
    assert found[1] == pytest.approx(4.56 / 3.66)
    assert "Rank 1 on node-b is the straggler" in straggler_words(ranks)


def test_equal_ranks_have_no_straggler() -> None:
    first = builders.ranks()[0]
    assert straggler((first, dataclasses.replace(first, rank=1))) is None
    assert straggler((first,)) is None
    assert straggler(()) is None
    idle = dataclasses.replace(first, phases_s={})
    assert straggler((idle, dataclasses.replace(idle, rank=1))) is None
    assert straggler_words((first,)) == "No rank makes the others wait."


CEILING = Ceiling(
    step_s=1.0, speedup=1.8, speedup_low=1.6, speedup_high=2.0, kind="cached", arm="cached", job_speedup=1.5
)


@pytest.mark.parametrize(
    ("ceiling", "expected"),
    [
        (None, "n/a"),
        (CEILING, "1.80× [1.60, 2.00] measured"),
        (Ceiling(step_s=1.0, speedup=1.0, job_speedup=1.8), "1.80× of the job measured"),
    ],
)
def test_a_ceiling_says_where_it_comes_from(ceiling: Ceiling | None, expected: str) -> None:
    assert show_ceiling(ceiling) == expected


def test_how_a_job_ended_is_said_only_where_it_ended_early() -> None:
    assert ended_early(builders.job()) is None
    assert ended_early(builders.job(ended="interrupted")) == (
        "The job was interrupted before the diagnosis was complete."
    )
    crashed = builders.job(ended="crashed", error="ValueError: x")
    assert ended_early(crashed) == "The job crashed before the diagnosis was complete: ValueError: x"


def test_instruments_name_only_what_was_taken() -> None:
    assert instruments(builders.bare_evidence()) == ()
    assert "kernels" in instruments(builders.evidence())
    assert "operators" in instruments(builders.cpu_evidence())


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("autocast", "with autocast on"),
        ("workers", "with num_workers=4"),
        ("batched-call", f"with one batched call at {builders.SYNC_LINE}"),
        ("my own", "my own arm"),
    ],
)
def test_every_kind_of_arm_says_what_was_changed_and_what_that_costs(kind: str, label: str) -> None:
    def read(speedup: float, low: float, high: float) -> str:
        made = replace(
            builders.counterfactuals()[0],
            kind=kind,
            label="my own arm",
            speedup=speedup,
            speedup_low=low,
            speedup_high=high,
            value=4.0,
            place=builders.SYNC_LINE,
        )
        (reading,) = read_arms(builders.evidence(counterfactuals=(made,), steps=waiting(0.8)))
        assert reading.label == label
        return reading.words

    assert read(4.0, 3.5, 4.5).endswith("costs 75 % of the step")
    assert read(1.0, 0.98, 1.03).endswith("is not the limit")
    assert read(1.2, 0.8, 1.7).startswith("within the noise")


def test_blocks_that_were_knocked_out_are_left_to_the_map() -> None:
    made = replace(builders.counterfactuals()[0], kind="knock-out", place=builders.SYNC_LINE)
    assert read_arms(builders.evidence(counterfactuals=(made,))) == ()


def test_no_more_than_the_whole_step_grows_with_the_batch() -> None:
    half = replace(builders.counterfactuals()[1], speedup=2.06, speedup_low=1.5, speedup_high=2.8)
    (reading,) = read_arms(builders.evidence(counterfactuals=(half,)))
    assert "grows with the batch" not in reading.words and "work per sample" in reading.words


def test_a_finding_says_what_proves_it_or_why_nothing_does() -> None:
    proven, unproven, with_another, _memory = builders.findings()
    (words,) = proof_words(proven)
    assert words.startswith("measured (knock-out examples/darkroom/model.py:58): the step takes 2.53 s")
    assert words.endswith("2.90× for the whole job")
    assert list(proof_words(unproven)) == ["no ceiling: knock-out model.py:40: no time was left for it"]
    assert list(proof_words(with_another))[1] == (
        f"the same cause: FO101 single-process-loading at {builders.LOADER_LINE}, 4 % of the step"
    )


def test_every_arm_that_proves_a_rule_is_read_in_words_of_its_own() -> None:
    seen_in_passing = {"knock-out", "outside", "epoch starts", "compilation", "kernels"}
    assert {kind for rule in all_rules() for kind in rule.arms} - seen_in_passing <= set(ARMS)


@pytest.mark.parametrize(("ended", "is_too_little"), [("finished", True), ("measured", False)])
def test_a_job_that_ended_before_anything_was_counted_is_not_said_to_be_clean(
    ended: str, is_too_little: bool
) -> None:
    evidence = builders.cpu_evidence(counterfactuals=(), sites=(), module_calls=())
    evidence = replace(evidence, job=replace(evidence.job, ended=ended))
    words = too_little(evidence)
    assert (words is not None) == is_too_little
    if words is not None:
        number = len(evidence.steps)
        assert f"the job ended after {number} steps. Let it run for 100 steps." in words


def test_a_ceiling_that_is_the_observed_wait_is_said_to_be() -> None:
    finding = replace(builders.findings()[0], ceiling=replace(CEILING, is_capped=True))
    assert (
        "without the observed time the step takes 1.00 s, 1.50× for the whole job; cached shortened it more"
        in (*proof_words(finding),)
    )
