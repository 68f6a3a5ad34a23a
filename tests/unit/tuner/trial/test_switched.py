"""When an arm needs no more blocks."""

from __future__ import annotations

import pytest

from flatout.measure.arms.arm import Arm, Same
from flatout.measure.evidence import Counterfactual
from flatout.tuner.trial.switched import MOST_ROUNDS, NOISE_ROUNDS, is_settled


def shown(speedup: float, low: float, high: float) -> Counterfactual:
    return Counterfactual(
        kind="x", label="x", baseline="real", step_s=1.0, baseline_step_s=speedup, speedup=speedup,
        speedup_low=low, speedup_high=high, num_blocks=3, num_steps=9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_blocks", "gained", "settled"),
    [
        (2, shown(2.0, 1.9, 2.1), False),  # too few
        (4, shown(2.0, 1.9, 2.1), False),  # to keep it takes more than to drop it
        (5, shown(2.0, 1.9, 2.1), True),
        (3, shown(1.1, 1.0, 1.2), False),
        (3, shown(1.005, 0.9, 1.1), True),  # it shows nothing
        (3, shown(1.02, 1.015, 1.025), True),  # less than 3 %, and that is clear
        (3, None, False),
        (MOST_ROUNDS, shown(1.1, 1.0, 1.2), True),
        (MOST_ROUNDS, None, True),
    ],
)
def test_an_arm_is_settled_when_the_bound_is_clear(
    num_blocks: int, gained: Counterfactual | None, settled: bool
) -> None:
    assert is_settled(Arm(), num_blocks, gained) is settled


def test_noise_gets_as_many_blocks_as_it_takes_to_know_it() -> None:
    nothing = shown(1.0, 0.99, 1.01)
    assert not is_settled(Same(), NOISE_ROUNDS - 1, nothing) and is_settled(Same(), NOISE_ROUNDS, nothing)
