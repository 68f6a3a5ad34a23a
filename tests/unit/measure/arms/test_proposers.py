from __future__ import annotations

from flatout.measure.arms.proposers import PROPOSERS


def test_every_proposer_is_the_propose_of_its_own_module() -> None:
    assert [propose.__name__ for propose in PROPOSERS] == ["propose"] * len(PROPOSERS)
    assert len({propose.__module__ for propose in PROPOSERS}) == len(PROPOSERS)
