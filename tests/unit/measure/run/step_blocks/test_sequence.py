from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.measure.arms.arm import REAL, Arm, Same
from flatout.measure.evidence import INSTRUMENTS
from flatout.measure.run.observer import ObserverOptions
from flatout.measure.run.step_blocks.schedule import ENDED_FIRST, StepBlock
from flatout.measure.run.step_blocks.sequence import MOST_RECOUNTS, BlockSequence
from flatout.measure.run.step_rows import StepRow

STEP_S = 0.01
LONG_S = 600.0


class Alone:
    """One process: no other rank has to agree."""

    is_needed = shared = False


class Notes:
    """What the passes of an observer leave."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        yield


def row(arm: str = REAL) -> StepRow:
    return StepRow(
        index=1,
        arm=arm,
        block=0,
        transition=False,
        totals=[STEP_S, 0, 0, 0, 0, 0, 0],
        marks=[],
        rows=None,
        num_batches=1,
        num_forwards=1,
        num_backwards=1,
        epoch_start=False,
    )


def unused() -> Any:
    """Stand in for the context of proposers: there are none here."""


class Case:
    """A sequence, and what it was made of."""

    def __init__(self, *, skipped: dict[str, str] | None = None, **options: Any) -> None:
        self.deadline, self.notes, self.rows = SimpleNamespace(seconds_left=LONG_S), Notes(), [row()]
        agreement: Any = Alone()
        deadline: Any = self.deadline
        tools: Any = self.notes
        self.sequence = BlockSequence(
            ObserverOptions(folder=".", **{"proposers": (), **options}),
            self.rows,
            agreement=agreement,
            deadline=deadline,
            tools=tools,
            skipped=skipped or {},
            context=unused,
        )

    def begin(self) -> list[StepBlock]:
        self.sequence.begin(self.sequence.plan(STEP_S, device="cpu"))
        return self.sequence.blocks

    def end(self) -> None:
        """End the current block."""
        self.sequence.number += 1


@pytest.fixture
def case() -> Case:
    return Case()


def test_every_instrument_has_a_block_before_the_arms(case: Case) -> None:
    blocks = case.begin()
    assert {block.arm for block in blocks} == {REAL, *INSTRUMENTS}
    assert case.sequence.block == blocks[0] and not case.sequence.is_over
    assert not case.sequence.has_run_real
    for _ in blocks:
        case.end()
    assert case.sequence.is_over and case.sequence.has_run_real
    assert case.sequence.block == blocks[-1]


def test_passes_that_would_take_the_time_of_the_arms_are_dropped(case: Case) -> None:
    case.begin()
    case.deadline.seconds_left = LONG_S / 10
    case.end()
    ahead = {block.arm for block in case.sequence.blocks[1:]}
    case.sequence.drop_passes()
    assert not set(INSTRUMENTS) & {block.arm for block in case.sequence.blocks[1:]}
    said = {message.partition(":")[0] for message in case.notes.missing}
    assert said == ahead & set(INSTRUMENTS) and "no time was left" in case.notes.missing[0]


def test_a_count_is_repeated_a_few_times_at_most(case: Case) -> None:
    case.sequence.begin([StepBlock(arm="count", num_steps=2), StepBlock(arm=REAL, num_steps=3)])
    for _ in range(MOST_RECOUNTS + 2):
        case.sequence.count_again()
    assert [block.arm for block in case.sequence.blocks] == ["count"] * (1 + MOST_RECOUNTS) + [REAL]


def test_unchanged_steps_come_first_where_an_earlier_run_failed() -> None:
    case = Case(plain_steps=7)
    case.begin()
    assert case.sequence.next_blocks(3) == [StepBlock(arm=REAL, num_steps=4)]
    assert case.sequence.rounds is None


def test_arms_are_proposed_after_the_passes_and_run_beside_their_baseline() -> None:
    case = Case(same=True)
    for _ in case.begin():
        case.end()
    found = []
    for _ in range(4):
        case.sequence.blocks += case.sequence.next_blocks(10)
        found.append(case.sequence.block.arm)
        case.end()
    assert list(case.sequence.arms) == [Same().label]
    assert {REAL, Same().label} <= set(found)


def test_without_arms_the_last_block_is_one_of_unchanged_steps_and_comes_once() -> None:
    case = Case(counterfactuals=False)
    case.begin()
    assert [block.arm for block in case.sequence.next_blocks(10)] == [REAL]
    assert case.sequence.next_blocks(10) == []
    assert any("left out" in message for message in case.notes.missing)


def test_an_arm_is_acquitted_with_those_that_are_compared_with_it() -> None:
    failed = "the script failed under it: ValueError: own"
    skipped = {"cached": failed, "gone": failed, "other": "the script failed under it: another"}
    sequence = Case(skipped=skipped).sequence
    cached, half, other = Arm(), Arm(), Arm()
    cached.label, half.label, half.baseline, other.label = "cached", "half", "cached", "other"
    cached.refusal, half.refusal = failed, f"it is compared with cached steps: {failed}"
    other.refusal = skipped["other"]
    sequence.arms = {arm.label: arm for arm in (cached, half, other)}
    sequence.acquit(["cached", "gone"])
    assert (cached.refusal, half.refusal) == (ENDED_FIRST, ENDED_FIRST)
    assert other.refusal == "the script failed under it: another"
    assert [(arm.label, arm.reason) for arm in sequence.arms_not_run(())] == [("gone", ENDED_FIRST)]
