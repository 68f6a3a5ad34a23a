from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.loading.respawned_workers import detect
from flatout.measure.evidence import EpochStart


def respawning(made, *, iter_s=0.4, first_wait_s=0.1, num_epochs=3, steps=None, **changes):
    fields = {
        "num_workers": 2,
        "epochs": (EpochStart(iter_s=iter_s, first_wait_s=first_wait_s),) * num_epochs,
        **changes,
    }
    return made.evidence(loaders=(made.loader(**fields),), steps=steps or made.steps())


def test_fires_at_the_loader(made):
    (finding,) = detect(respawning(made))
    assert (finding.code, finding.name) == ("FO102", "respawned-workers")
    assert finding.place == made.place(10)
    assert finding.share == pytest.approx(0.5 / 2.5)
    assert finding.ceiling.step_s == pytest.approx(0.1)
    assert (finding.ceiling.speedup, finding.ceiling.job_speedup) == (1.0, pytest.approx(2.5 / 2.0))


def test_workers_that_end_cost_time_too(made):
    ends = (EpochStart(iter_s=0.4, first_wait_s=0.1), EpochStart(iter_s=0.4, first_wait_s=0.1, end_s=0.3))
    (finding,) = detect(respawning(made, epochs=ends))
    assert finding.share == pytest.approx(0.8 / 2.8)


def test_no_more_is_promised_than_an_epochs_first_step_takes_longer(made):
    """Workers that start while the last batches are still computed cost less than they take."""
    first = dataclasses.replace(made.steps()[0], index=9, epoch_start=True, kept=False, step_s=0.4)
    (finding,) = detect(respawning(made, steps=(*made.steps(), first)))
    assert finding.share == pytest.approx(0.3 / 2.3)


def test_a_first_step_that_computes_more_slowly_belongs_to_the_start(made):
    """Memory that a fork shares is copied at the first write; an evaluation between epochs writes nothing."""

    def share(**more_s):
        phases = {phase: s + more_s.get(phase, 0.0) for phase, s in usual.phases_s.items()}
        first = dataclasses.replace(
            usual, index=9, epoch_start=True, kept=False, phases_s=phases, step_s=1.0 + usual.step_s
        )
        return detect(respawning(made, steps=(*made.steps(), first)))[0].share

    usual = made.steps()[0]
    assert share(forward=0.3) == share() == pytest.approx(0.5 / 3.0)
    assert share(optimizer=0.2, backward=0.1) == pytest.approx(0.8 / 3.0)


@pytest.mark.parametrize(("iter_s", "fires"), [(0.107, True), (0.103, False)])
def test_the_start_must_matter_to_the_epoch(made, iter_s, fires):
    assert bool(detect(respawning(made, iter_s=iter_s, first_wait_s=0.0))) == fires


def test_a_first_batch_that_is_slow_in_itself_is_not_a_start(made):
    job = respawning(
        made,
        iter_s=0.01,
        first_wait_s=0.5,
        fetch_s=made.spread(0.4),
        collate_s=made.spread(0.1),
    )
    assert detect(job) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"persistent_workers": True},
        {"num_workers": 0},
        {"trains": False},
        {"num_batches": None},
        {"num_epochs": 1},
        {"num_batches": 2000},
    ],
)
def test_look_alikes(made, changes):
    assert detect(respawning(made, **changes)) == []


def test_accumulation_shortens_the_epoch_in_steps(made):
    start = {"iter_s": 0.09, "first_wait_s": 0.0}
    assert detect(respawning(made, **start)) == []
    assert detect(respawning(made, **start, steps=made.steps(num_batches=4)))
