from __future__ import annotations

import pytest

from flatout.doctor.rules.ranks.straggler_rank import detect
from flatout.measure.evidence import Rank


def ranks(made, *waits_s, backward_s=0.05, meets_in=(), spread_s=None):
    """Ranks of a step of 100 ms that wait this long for their batches."""
    half_s = None if spread_s is None else spread_s / 2
    made_ranks = (
        Rank(
            rank=number,
            step_s=0.1,
            phases_s={"wait": wait_s, "forward": 0.02, "backward": backward_s},
            ended="measured",
            meets_in=meets_in,
            own_low_s=None if half_s is None else wait_s + 0.02 - half_s,
            own_high_s=None if half_s is None else wait_s + 0.02 + half_s,
        )
        for number, wait_s in enumerate(waits_s)
    )
    return made.evidence(ranks=tuple(made_ranks))


def test_names_the_rank_and_the_phase_in_which_it_differs(made):
    (finding,) = detect(ranks(made, 0.01, 0.01, 0.03))
    assert (finding.code, finding.name) == ("FO701", "straggler-rank")
    assert finding.message.startswith("rank 2 makes the others wait 20 % of the step")
    assert finding.share == pytest.approx(0.2)
    assert finding.ceiling is None and finding.no_ceiling
    assert "in wait" in finding.fix


def test_ranks_that_are_alike_or_alone_are_left_alone(made):
    assert detect(ranks(made, 0.01, 0.01)) == []
    assert detect(ranks(made, 0.03)) == []
    assert detect(made.evidence()) == []


def test_a_difference_that_is_little_of_the_step_is_left_alone(made):
    assert detect(ranks(made, 0.01, 0.014)) == []  # 4 % of the step, though 1.13 times the other's work


@pytest.mark.parametrize(("spread_s", "fires"), [(0.01, True), (0.02, False)])
def test_a_difference_within_its_noise_is_left_alone(made, spread_s, fires):
    assert bool(detect(ranks(made, 0.01, 0.01, 0.03, spread_s=spread_s))) == fires


def test_a_phase_with_collectives_includes_waits_for_others(made):
    assert detect(ranks(made, 0.01, 0.01, 0.03, meets_in=("wait",))) == []
    (finding,) = detect(ranks(made, 0.01, 0.01, 0.03, meets_in=("forward",)))
    assert "in wait" in finding.fix
    assert detect(ranks(made, 0.01, 0.01, 0.03, meets_in=("wait", "forward"))) == []
