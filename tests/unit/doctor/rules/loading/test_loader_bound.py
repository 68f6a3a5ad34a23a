from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.loading import single_process_loading
from flatout.doctor.rules.loading.loader_bound import detect
from flatout.measure.evidence import Host, Rank


def waiting(made, *counterfactuals, wait_share=0.6, num_workers=2, **changes):
    loader = made.loader(num_workers=num_workers)
    return made.evidence(
        steps=made.steps(wait_share=wait_share),
        loaders=(loader,),
        counterfactuals=counterfactuals,
        **changes,
    )


def test_workers_that_cannot_keep_up_are_found_at_the_loader(made):
    (finding,) = detect(waiting(made, made.counterfactual("cached", 2.0)))
    assert (finding.code, finding.place, finding.ceiling.speedup) == ("FO105", made.place(10), 2.0)
    assert "2 workers cannot keep up" in finding.message


def test_more_workers_that_gain_are_enough(made):
    """Steps that never wait get less of a busy machine, so cached ones may show nothing there."""
    workers = made.counterfactual("workers", 1.8, value=4.0)
    (finding,) = detect(waiting(made, made.counterfactual("cached", 0.9), workers))
    assert (finding.ceiling.kind, finding.ceiling.speedup) == ("workers", 1.8)
    assert finding.fix == "give this DataLoader num_workers=4"


def test_ranks_that_share_the_cores_are_told_of_a_loader_without_workers(made):
    ranks = tuple(Rank(rank=rank, host="a", step_s=0.1, phases_s={}, ended="measured") for rank in range(2))
    job = waiting(
        made,
        made.counterfactual("cached", 12.7),
        wait_share=0.9,
        num_workers=0,
        ranks=ranks,
        host=Host(cores=2.0, memory_bytes=2**34),
    )
    (finding,) = detect(job)
    assert finding.ceiling.speedup == pytest.approx(1 / (1 - 0.9))  # no more than the step waits
    assert "the training process cannot keep up" in finding.message
    assert finding.fix.startswith("make samples cheaper")
    assert single_process_loading.detect(job) == []


def test_a_loader_that_workers_make_slower_is_told_to_make_whole_batches(made):
    tried = made.counterfactual("workers", 0.1, value=2.0)
    job = waiting(made, made.counterfactual("cached", 2.7), tried, num_workers=0)
    (finding,) = detect(job)
    assert finding.fix.startswith("make whole batches at once")
    assert finding.ceiling.kind == "cached"
    assert single_process_loading.detect(job) == []


def test_workers_that_wait_for_storage_are_not_said_to_want_cores(made):
    blocked = made.loader(
        num_workers=6, fetch_s=made.spread(0.06), collate_s=made.spread(0.0), blocked_s=0.059
    )
    tried = made.counterfactual("workers", 1.03, value=8.0)
    job = waiting(made, made.counterfactual("cached", 2.0), tried, num_workers=6)
    (finding,) = detect(dataclasses.replace(job, loaders=(blocked,)))
    assert finding.fix.startswith("wait less for storage") and "cores" not in finding.fix
    assert finding.fix.endswith("more workers were not seen to help")
    many = dataclasses.replace(blocked, num_workers=16)
    untried = waiting(made, made.counterfactual("cached", 2.0), num_workers=16)
    (finding,) = detect(dataclasses.replace(untried, loaders=(many,)))
    assert finding.fix.startswith("wait less for storage") and "not seen" not in finding.fix


def test_a_busy_machine_that_delays_batches_which_are_ready_is_no_slow_loader(made):
    """As seen where other jobs used the cores: 11 % of the step, for batches finished three steps earlier."""
    job = waiting(made, made.counterfactual("cached", 1.11), wait_share=0.11)
    late, ready = (
        dataclasses.replace(
            job, loaders=(made.loader(num_workers=2, wait_s=made.spread(0.011), late_s=late_s),)
        )
        for late_s in (0.0109, 0.0)
    )
    assert [finding.code for finding in detect(late)] == ["FO105"]
    assert detect(ready) == []


def test_batches_that_are_costly_to_hand_over_are_not_blamed_on_slow_workers(made):
    job = waiting(made, made.counterfactual("cached", 2.0))
    ready = made.loader(num_workers=2, wait_s=made.spread(0.06), late_s=0.001)
    (finding,) = detect(dataclasses.replace(job, loaders=(ready,)))
    assert "cannot keep up" not in finding.message and "have ready" in finding.message
    assert finding.fix.startswith("hand over less")


@pytest.mark.parametrize(
    ("cached", "changes"),
    [(1.0, {}), (2.0, {"wait_share": 0.05}), (2.0, {"num_workers": 0})],  # the last is FO101's
)
def test_look_alikes(made, cached, changes):
    assert detect(waiting(made, made.counterfactual("cached", cached), **changes)) == []
