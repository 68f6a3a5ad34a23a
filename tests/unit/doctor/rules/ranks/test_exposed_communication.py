from __future__ import annotations

import pytest

from flatout.doctor.rules.ranks.exposed_communication import detect
from flatout.measure.evidence import Counterfactual, Rank


def ranks(*exposed):
    return tuple(
        Rank(
            rank=number,
            step_s=0.1,
            phases_s={},
            ended="measured",
            host=f"gpu-node-{number}",
            communication_share=0.6,
            exposed_share=share,
        )
        for number, share in enumerate(exposed)
    )


def unsynchronised(speedup, *, low=None):
    return Counterfactual(
        kind="unsynchronised",
        label="unsynchronised",
        baseline="real",
        step_s=0.1 / speedup,
        baseline_step_s=0.1,
        speedup=speedup,
        speedup_low=low or speedup - 0.02,
        speedup_high=speedup + 0.02,
        num_blocks=3,
        num_steps=30,
    )


def test_steps_without_an_exchange_are_its_ceiling(made):
    (finding,) = detect(made.evidence(ranks=ranks(0.1, 0.3), counterfactuals=(unsynchronised(1.25),)))
    assert (finding.code, finding.name) == ("FO702", "exposed-communication")
    assert finding.share == pytest.approx(0.2)
    assert finding.ceiling is not None and finding.ceiling.speedup == pytest.approx(1.25)
    assert finding.evidence[0].endswith("10 % (rank 0 on gpu-node-0) to 30 % (rank 1 on gpu-node-1)")


def test_without_the_arm_the_rank_that_waits_for_nobody_is_asked(made):
    (finding,) = detect(made.evidence(ranks=ranks(0.3, 0.1), counterfactuals=()))
    assert finding.share == pytest.approx(0.1)
    assert finding.ceiling is None and finding.no_ceiling


def test_an_exchange_that_is_hidden_is_left_alone(made):
    assert detect(made.evidence(ranks=ranks(0.3, 0.3), counterfactuals=(unsynchronised(1.01),))) == []
    assert detect(made.evidence(ranks=ranks(0.02, 0.3), counterfactuals=())) == []
    assert detect(made.evidence(ranks=ranks(None, None), counterfactuals=())) == []
    assert detect(made.evidence(ranks=ranks(0.3))) == []
