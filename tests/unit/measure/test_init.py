"""The clock counts in the order of the names."""

from __future__ import annotations

from typing import get_args

from flatout.measure import PHASES, Phase, clock


def test_the_clock_counts_the_phases_in_their_order() -> None:
    assert get_args(Phase) == PHASES
    assert [PHASES[getattr(clock, phase.upper())] for phase in PHASES] == list(PHASES)
