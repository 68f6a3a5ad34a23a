"""A choice that says why."""

from __future__ import annotations

import dataclasses

import pytest

from flatout.ground.decisions import Decision


def test_a_decision_reads_as_value_source_and_reason() -> None:
    decision = Decision(value=4, reason="the container owns four cores", source="measured")
    assert str(decision) == "4 (measured: the container owns four cores)"
    assert decision.value + 1 == 5


def test_a_decision_is_a_value() -> None:
    decision = Decision(value="bf16", reason="the chip has it", source="datasheet")
    assert decision == Decision(value="bf16", reason="the chip has it", source="datasheet")
    assert decision != Decision(value="bf16", reason="the chip has it", source="assumed")
    assert hash(decision) == hash(dataclasses.replace(decision))


def test_a_decision_cannot_be_changed() -> None:
    decision = Decision(value=1, reason="because", source="computed")
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.value = 2  # type: ignore[misc]
