from __future__ import annotations

from typing import Any

import pytest

from flatout.measure.arms.arm import UNWATCHED
from flatout.measure.clock import BACKWARD, EXCLUDED, FORWARD, NUM_REGIONS, REST
from flatout.measure.run.step_rows import StepRow, Watching, build_steps, usual_forwards, watching
from flatout.measure.statistics import compare


def row(
    index: int, arm: str = "real", *, excluded_s: float = 0.0, forward_s: float = 0.1, **changes: Any
) -> StepRow:
    totals = [0.0] * NUM_REGIONS
    totals[FORWARD], totals[EXCLUDED] = forward_s, excluded_s
    fields: dict[str, Any] = {
        "block": 0, "transition": False, "marks": [], "rows": 4, "num_batches": 1,
        "num_forwards": 1, "num_backwards": 1, "epoch_start": False,
    }  # fmt: skip
    return StepRow(index=index, arm=arm, totals=totals, **{**fields, **changes})


def kept(rows: list[StepRow]) -> list[int]:
    return [step.index for step in build_steps(rows) if step.kept]


def test_the_host_clock_is_the_step_where_there_is_no_gpu() -> None:
    (step,) = build_steps([row(3, excluded_s=0.7)])
    assert (step.index, step.step_s, step.phases_s["forward"]) == (3, pytest.approx(0.1), 0.1)
    assert step.device_phases_s is None


class Event:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_the_gpus_clock_is_the_step_where_there_is_one() -> None:
    marks = [(FORWARD, Event(0)), (BACKWARD, Event(300)), (REST, Event(1000))]
    (step,) = build_steps([row(0, marks=marks)])
    assert step.step_s == pytest.approx(1.0)
    assert step.device_phases_s is not None
    assert step.device_phases_s["backward"] == pytest.approx(0.7)
    assert step.phases_s["forward"] == 0.1


def test_transitions_and_epoch_starts_are_not_kept() -> None:
    rows = [row(0, transition=True), row(1), row(2, epoch_start=True), row(3), row(4)]
    assert kept(rows) == [1, 3, 4]


def test_steps_that_hold_an_episode_are_not_kept() -> None:
    assert kept([row(0), row(1, apart=True), row(2)]) == [0, 2]


def test_where_most_steps_start_an_epoch_their_starts_are_what_a_step_costs() -> None:
    assert kept([row(i, epoch_start=i % 3 != 0) for i in range(6)]) == list(range(6))


def test_steps_that_hold_something_else_are_not_kept() -> None:
    rows = [row(i, forward_s=0.9 if i == 4 else 0.1) for i in range(8)]
    assert kept(rows) == [0, 1, 2, 3, 5, 6, 7]


def test_no_rows_no_steps() -> None:
    assert build_steps([]) == ()


def test_a_number_of_model_calls_is_usual_if_most_steps_have_it() -> None:
    assert usual_forwards([row(number, num_forwards=9 if number == 4 else 2) for number in range(6)]) == 2
    assert usual_forwards([row(number, num_forwards=number) for number in range(6)]) is None
    with_games = [row(number, num_forwards=8 + 20 * (number % 3 == 0)) for number in range(31)]
    assert usual_forwards(with_games) == 8  # in 20 of 31 steps: each game is followed by three updates
    assert usual_forwards([row(0), row(1)]) is None
    assert usual_forwards([]) is None


def interleaved(**steps_s: float) -> list[StepRow]:
    """Six rounds of blocks of ten steps, of these seconds."""
    rows: list[StepRow] = []
    for number in range(6 * len(steps_s)):
        arm = list(steps_s)[number % len(steps_s)]
        seconds = [steps_s[arm] * (1 + uneven / 100) for uneven in range(-5, 6)]
        rows += [row(len(rows) + each, arm, block=number, forward_s=s) for each, s in enumerate(seconds)]
    return rows


def test_what_notes_cost_is_what_steps_without_them_do_not_take() -> None:
    found = watching(interleaved(real=0.3e-3, unwatched=0.25e-3))
    assert found.seconds == pytest.approx(0.05e-3)
    assert 0 < found.low_s < found.seconds < found.high_s


@pytest.mark.parametrize("steps_s", [{"real": 0.3e-3, UNWATCHED: 0.3e-3}, {"real": 0.3e-3}])
def test_notes_cost_nothing_that_was_not_measured(steps_s: dict[str, float]) -> None:
    assert watching(interleaved(**steps_s)) == Watching()


def test_notes_are_taken_off_every_timed_step_and_its_phases() -> None:
    rows = [row(number, arm) for number, arm in enumerate(("real", "half", UNWATCHED, "count", "warmup"))]
    steps = build_steps(rows, watching_s=0.04)
    assert [step.step_s for step in steps] == pytest.approx([0.06, 0.06, 0.1, 0.1, 0.1])
    assert [step.phases_s["forward"] for step in steps] == pytest.approx([0.06, 0.06, 0.1, 0.1, 0.1])
    (most,) = build_steps(rows[:1], watching_s=0.09)
    assert most.step_s == pytest.approx(0.05)  # half of a step is the job's in any case


def test_an_arm_of_a_short_step_gains_what_it_gains_without_notes() -> None:
    rows = interleaved(real=0.3e-3, half=0.15e-3)
    plain = compare(build_steps(rows), label="half", baseline="real")
    notes = Watching(0.05e-3, 0.04e-3, 0.06e-3)
    found = compare(build_steps(rows, watching_s=notes.seconds), label="half", baseline="real")
    assert plain is not None and found is not None
    wider = notes.taken_off(found)
    assert wider.speedup == pytest.approx(2.5, rel=0.01) and plain.speedup == pytest.approx(2.0)
    assert wider.speedup_low < found.speedup_low * 0.96 and wider.speedup_high > found.speedup_high * 1.05
