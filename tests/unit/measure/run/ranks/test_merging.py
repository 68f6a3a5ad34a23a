from __future__ import annotations

import dataclasses
import json

from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.codec import encode
from flatout.measure import PHASES
from flatout.measure.evidence import Evidence, Network, Rank, Step
from flatout.measure.run.ranks.merging import merge, rank_summary, slowest_of
from tests.support import doctor as builders
from tests.support.doctor import evidence_of_rank


def merge_all(made: list[Evidence], *, world_size: int) -> Evidence:
    ranks = [rank_summary(each) for each in made]
    slowest = slowest_of(ranks).rank
    by_rank = {each.job.rank: each for each in made}
    return merge(by_rank[0], by_rank[slowest], ranks, world_size=world_size)


@given(work_s=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6, unique=True), data=st.data())
def test_the_slowest_rank_speaks_for_the_job(work_s: list[float], data: st.DataObject) -> None:
    """All take the same time by the wall: the fast ones wait for the slow one in backward."""
    slowest = work_s.index(max(work_s))
    made = [evidence_of_rank(i, own_s=own_s, waiting_s=12.0 - own_s) for i, own_s in enumerate(work_s)]
    merged = merge_all(data.draw(st.permutations(made)), world_size=len(made))
    assert merged.steps == made[slowest].steps
    assert (merged.job.rank, merged.job.world_size) == (slowest, len(made))
    assert merged.job.command == ("rank 0",)
    assert [each.rank for each in merged.ranks] == list(range(len(made)))
    assert [each.phases_s["forward"] for each in merged.ranks] == work_s


def test_ranks_that_left_nothing_are_said() -> None:
    alone = [evidence_of_rank(0, own_s=1.0, waiting_s=0.0)]
    assert any("1 of 4 ranks" in message for message in merge_all(alone, world_size=4).missing)
    assert not any("ranks" in message for message in merge_all(alone, world_size=1).missing)


def test_a_rank_is_summed_up_with_its_node_its_phases_and_its_exchange() -> None:
    kernels = dataclasses.replace(builders.kernels(), step_s=0.5, communication_s=0.2, exposed_s=0.1)
    network = Network(
        backend="gloo",
        num_ranks=4,
        small_bytes=1,
        small_s=1.0,
        large_bytes=2,
        large_s=2.0,
        bus_bytes_per_s=1.0,
        link="eth0",
        link_bytes_per_s=125e6,
    )
    evidence = evidence_of_rank(3, own_s=1.0, waiting_s=2.0)
    job = dataclasses.replace(evidence.job, host="gpu-node-1", node=1)
    summary = rank_summary(dataclasses.replace(evidence, job=job, kernels=kernels, network=network))
    assert (summary.rank, summary.step_s, summary.host, summary.node) == (3, 3.0, "gpu-node-1", 1)
    assert set(summary.phases_s) == set(PHASES)
    assert (summary.communication_share, summary.exposed_share) == (0.4, 0.2)
    assert (summary.link, summary.link_bytes_per_s) == ("eth0", 125e6)


def test_a_rank_without_steps_has_no_step_time() -> None:
    empty = dataclasses.replace(builders.bare_evidence(), job=builders.job(rank=1))
    assert rank_summary(empty).step_s is None
    assert merge_all([evidence_of_rank(0, own_s=1.0, waiting_s=0.0), empty], world_size=2).job.rank == 0


def test_what_a_rank_adds_does_not_grow_with_their_number() -> None:
    def size(num: int) -> int:
        made = [evidence_of_rank(i, own_s=1.0 + i / 100, waiting_s=1.0) for i in range(num)]
        return len(json.dumps(encode(merge_all(made, world_size=num))))

    few, some, many = size(2), size(8), size(64)
    assert (many - some) / 56 < 1.05 * (some - few) / 6
    assert (many - some) / 56 < 1024


def test_the_interval_of_a_rank_is_that_of_phases_in_which_it_meets_no_other() -> None:
    def rank(*own_s: float, meets_in: tuple[str, ...] = ()) -> Rank:
        steps = tuple(
            Step(
                index=index,
                arm="real",
                block=0,
                step_s=1.0,
                phases_s={"wait": seconds, "forward": 0.5, "backward": 0.5 - seconds},
            )
            for index, seconds in enumerate(own_s)
        )
        made = evidence_of_rank(0, own_s=0.0, waiting_s=0.0)
        return rank_summary(dataclasses.replace(made, steps=steps, meets_in=meets_in))

    noisy = rank(0.1, 0.3, 0.1, 0.3)
    assert noisy.own_low_s is not None and noisy.own_high_s is not None
    assert 0.6 <= noisy.own_low_s < 0.7 < noisy.own_high_s <= 0.8
    sharded = rank(0.1, 0.3, 0.1, 0.3, meets_in=("forward",))
    assert sharded.meets_in == ("forward",)
    assert sharded.own_high_s is not None and sharded.own_high_s <= 0.3
    assert rank(0.1, 0.3).own_low_s is None
