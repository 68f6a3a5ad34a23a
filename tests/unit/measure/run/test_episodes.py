"""Episodes of runs made up of rows and looks; a step takes 10 ms and is found at line 20."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flatout.measure.clock import FORWARD, NUM_REGIONS, WAIT
from flatout.measure.evidence import Episode, Place
from flatout.measure.lines.stack_watch import Look
from flatout.measure.run.episodes import find_episodes, heaviest
from flatout.measure.run.step_rows import StepRow

STEP_S = 0.01
MAIN = Place(file="train.py", line=50, function="main")
STEP = Place(file="train.py", line=20, function="train")
CALLS = Place(file="train.py", line=31, function="train")
INSIDE = Place(file="train.py", line=7, function="evaluate")
DRAWS = Place(file="data.py", line=12, function="Order.__iter__")
SAVES = Place(file="train.py", line=33, function="train")


class Run:
    """A run under construction."""

    def __init__(self) -> None:
        self.rows: list[StepRow] = []
        self.looks: list[Look] = []
        self.at_s = 100.0

    def look(self, *places: Place, at_s: float, weight_s: float = 0.04, **changes: Any) -> None:
        fields = {"callee": None, "library": None, "in_model": False, **changes}
        self.looks.append(Look(at_s, weight_s, places, **fields))

    def step(self, work_s: float = STEP_S, *, wait_s: float = 0.0, **changes: Any) -> tuple[float, float]:
        """One step, of which the last tenth is a typical one; returns its start and its end."""
        totals = [0.0] * NUM_REGIONS
        totals[FORWARD], totals[WAIT] = work_s, wait_s
        start_s, self.at_s = self.at_s, self.at_s + work_s + wait_s
        fields: dict[str, Any] = {
            "arm": "real", "block": 0, "transition": False, "marks": [], "rows": 4, "num_batches": 1,
            "num_forwards": 1, "num_backwards": 1, "epoch_start": False, "ended_at_s": self.at_s,
        }  # fmt: skip
        self.rows.append(StepRow(index=len(self.rows), totals=totals, **{**fields, **changes}))
        return start_s, self.at_s

    def steps(self, num: int) -> None:
        for _ in range(num):
            start_s, _ = self.step()
            self.look(MAIN, STEP, at_s=start_s + STEP_S / 2, in_model=True)

    def episodes(self, **changes: Any) -> tuple[Episode, ...]:
        given: dict[str, Any] = {
            "stacks": None, "loops": lambda place: (), "steps_per_epoch": None, "started_at_s": 100.0,
            "has_loader": True, **changes,
        }  # fmt: skip
        return find_episodes(self.rows, self.looks, **given)


def test_a_run_of_typical_steps_has_no_episodes() -> None:
    run = Run()
    run.steps(30)
    assert run.episodes() == ()
    assert Run().episodes() == ()


def test_short_games_are_found_by_the_models_they_call() -> None:
    """A game that adds a fifth of a step makes no long step; two in three of these have no sample."""
    run = Run()
    games_s = 0.0
    for number in range(30):
        run.steps(9)
        start_s, end_s = run.step(1.2 * STEP_S, num_forwards=3)
        games_s += 0.2 * STEP_S
        if number % 3 == 0:
            run.look(MAIN, CALLS, at_s=start_s + 1e-3, weight_s=0.004)
            run.look(MAIN, STEP, at_s=end_s - 1e-3, weight_s=0.02)
    (found,) = run.episodes(has_loader=False)
    assert (found.kind, found.place, found.times) == ("rollout", CALLS, 30)
    assert found.seconds == pytest.approx(games_s, rel=0.01)
    assert [row.apart for row in run.rows] == [row.num_forwards == 3 for row in run.rows]


def test_steps_that_call_models_ever_differently_are_no_games() -> None:
    run = Run()
    for number in range(30):
        start_s, _ = run.step((1 + number % 5 / 10) * STEP_S, num_forwards=1 + number % 5)
        run.look(MAIN, CALLS if number % 5 == 4 else STEP, at_s=start_s + 1e-3)
    assert run.episodes() == ()


def test_a_step_that_other_programs_held_up_is_no_episode() -> None:
    run = Run()
    for _ in range(3):
        run.steps(10)
        start_s, _ = run.step(0.4 + STEP_S, in_line_s=0.4)
        for number in range(10):
            run.look(MAIN, CALLS, at_s=start_s + 1e-3 + 0.04 * number)
    assert run.episodes() == ()
    run.rows = [replace(row, in_line_s=0.0) for row in run.rows]
    assert [episode.place for episode in run.episodes()] == [CALLS]


def test_other_programs_lengthen_games_as_they_lengthen_typical_steps() -> None:
    """Seen on a machine of 16 jobs on two cores: games of 62 % of the run were said to be 11 % of the job."""
    alone, crowded = Run(), Run()
    for _ in range(12):
        for run, times in ((alone, 1.0), (crowded, 5.0)):
            for number in range(16):
                took_s = 0.06 if number == 0 else STEP_S
                start_s, end_s = run.step(took_s * times, in_line_s=took_s * (times - 1))
                run.look(MAIN, STEP, at_s=end_s - 1e-3, weight_s=STEP_S * times)
                if number == 0:
                    run.look(MAIN, CALLS, at_s=start_s + 1e-3, weight_s=0.05 * times)
    (games,), (longer,) = alone.episodes(has_loader=False), crowded.episodes(has_loader=False)
    assert games.per_step_s and longer.per_step_s
    assert longer.per_step_s == pytest.approx(5 * games.per_step_s, rel=0.05)
    assert longer.seconds == pytest.approx(5 * games.seconds, rel=0.05)


def evaluated(every: int, times: int, **changes: Any) -> Run:
    run = Run()
    for _ in range(times):
        run.steps(every - 1)
        start_s, end_s = run.step(0.4 + STEP_S, num_forwards=9, **changes)
        for number in range(10):
            run.look(MAIN, CALLS, INSIDE, at_s=start_s + 1e-3 + 0.04 * number, in_model=number % 2 == 0)
        run.look(MAIN, STEP, at_s=end_s - 1e-4, weight_s=STEP_S, in_model=True)
    run.steps(2)
    return run


def test_an_evaluation_is_found_at_the_line_that_calls_it() -> None:
    (found,) = evaluated(10, 3).episodes()
    assert (found.kind, found.place, found.function) == ("evaluation", CALLS, "evaluate")
    assert (found.times, found.num_steps, found.samples) == (3, 32, 30)
    assert found.inside == INSIDE
    assert found.seconds == pytest.approx(1.2)
    assert found.per_step_s == pytest.approx(1.2 / 32)
    assert not found.with_epoch


def test_a_line_that_loops_by_itself_is_one_evaluation() -> None:
    """`total = sum(loss(model(x), y) for x, y in held_out)` loads and computes under one line."""
    loads = Place(file="data.py", line=5, function="Rows.__getitem__")
    computes = Place(file="model.py", line=9, function="Net.forward")
    run = Run()
    for _ in range(3):
        run.steps(9)
        start_s, end_s = run.step(0.4 + STEP_S, num_forwards=9)
        for number in range(10):
            at_s = start_s + 1e-3 + 0.04 * number
            if number % 2:
                run.look(MAIN, CALLS, computes, at_s=at_s, in_model=True)
            else:
                run.look(MAIN, CALLS, loads, at_s=at_s, library="loading")
        run.look(MAIN, STEP, at_s=end_s - 1e-4, weight_s=STEP_S, in_model=True)
    (found,) = run.episodes()
    assert (found.kind, found.place, found.function) == ("evaluation", CALLS, None)
    assert found.seconds == pytest.approx(1.2)


def test_what_comes_with_every_epoch_is_spread_over_its_length() -> None:
    run = evaluated(10, 1, epoch_start=True, begins_epoch=True)
    (found,) = run.episodes(steps_per_epoch=200.0)
    assert found.with_epoch
    assert found.per_step_s == pytest.approx(0.4 / 200)


@pytest.mark.parametrize(("slower", "traces_s"), [((1.5, 1.2, 1.1), 0.008), ((1.01, 1.2, 1.0), 0.0)])
def test_steps_that_an_episode_slows_belong_to_it(slower: tuple[float, ...], traces_s: float) -> None:
    """It drove the job's data out of the caches; a step further on that is slower has another reason."""
    run = Run()
    for _ in range(6):
        run.steps(10 if not run.rows else 5)
        start_s, _ = run.step(0.4 + STEP_S)
        for number in range(10):
            run.look(MAIN, SAVES, at_s=start_s + 1e-3 + 0.04 * number)
        for factor in slower:
            run.step(factor * STEP_S)
    run.steps(5)
    (found,) = run.episodes()
    assert found.seconds == pytest.approx(6 * (0.4 + traces_s))
    assert sum(row.apart for row in run.rows) == 6 * (1 + (3 if traces_s else 0))


def test_steps_that_hold_an_episode_are_marked_in_every_arm() -> None:
    run = evaluated(10, 2)
    other = [replace(row, arm="knock-out train.py:9") for row in run.rows]
    for row in other:
        row.ended_at_s += 100.0
    run.rows += other
    run.looks += [look._replace(time_s=look.time_s + 100.0) for look in run.looks]
    (found,) = run.episodes()
    assert found.times == 2  # those of an arm are not counted: it may leave the evaluation out
    assert [row.apart for row in run.rows] == [row.num_forwards > 1 for row in run.rows]


def test_an_evaluation_on_kept_batches_is_not_what_it_takes() -> None:
    """One epoch ended in an arm that serves batches, another in one that does not."""
    run = Run()
    for arm, took_s in (("cached", 0.05), ("workers=1", 0.4)):
        run.steps(9)
        for row in run.rows[-9:]:
            row.arm = arm
        epoch = {"arm": arm, "begins_epoch": True, "num_batches": 50, "num_forwards": 9}
        start_s, _ = run.step(took_s + STEP_S, **epoch)
        for number in range(4):
            run.look(MAIN, CALLS, INSIDE, at_s=start_s + 1e-3 + took_s / 4 * number)
    run.steps(5)
    (found,) = run.episodes(steps_per_epoch=100.0)
    assert (found.kind, found.times, found.num_steps) == ("evaluation", 1, 15)
    assert found.per_step_s == pytest.approx(0.4 / 100)


def test_steps_whose_evaluations_do_not_count_do_not_dilute_the_others() -> None:
    run = Run()
    for arm, took_s in (("real", 0.4), ("cached", 0.05), ("real", 0.4), ("cached", 0.05)):
        run.steps(9)
        for row in run.rows[-9:]:
            row.arm = arm
        start_s, _ = run.step(took_s + STEP_S, arm=arm, num_batches=50, num_forwards=9)
        for number in range(4):
            run.look(MAIN, CALLS, INSIDE, at_s=start_s + 1e-3 + took_s / 4 * number)
    (found,) = run.episodes()
    assert (found.times, found.num_steps) == (2, 20)
    assert found.per_step_s == pytest.approx(0.4 / 10)


def test_one_step_that_was_divided_wrongly_does_not_hide_that_a_cause_comes_with_the_epoch() -> None:
    run = evaluated(10, 19, epoch_start=True, begins_epoch=True)
    start_s, _ = run.step(0.4 + STEP_S, num_forwards=9)
    for number in range(10):
        run.look(MAIN, CALLS, INSIDE, at_s=start_s + 1e-3 + 0.04 * number)
    run.steps(10)
    (found,) = run.episodes(steps_per_epoch=200.0)
    assert found.times == 20 and found.with_epoch
    assert found.per_step_s == pytest.approx(0.4 / 200)


@pytest.mark.parametrize(("function", "num"), [("evaluate", 1), ("make_cache", 0)])
def test_an_evaluation_in_the_first_step_is_found_and_what_is_paid_once_is_not(
    function: str, num: int
) -> None:
    run = Run()
    start_s, _ = run.step(0.4 + STEP_S, arm="warmup")
    for number in range(10):
        run.look(MAIN, CALLS, replace(INSIDE, function=function), at_s=start_s + 1e-3 + 0.04 * number)
    run.step(arm="warmup")
    run.steps(2)
    found = run.episodes()
    assert len(found) == num
    for episode in found:
        assert (episode.kind, episode.place, episode.times, episode.num_steps) == ("evaluation", CALLS, 1, 4)
        assert episode.seconds == pytest.approx(0.4) and episode.per_step_s is None


def test_where_no_usual_step_was_looked_at_no_line_is_unusual() -> None:
    run = evaluated(10, 3)
    run.looks = [look for look in run.looks if CALLS in look.places]
    assert run.episodes() == ()


def test_steps_of_a_warm_up_that_only_get_faster_hold_nothing_else() -> None:
    run = Run()
    for work_s in (0.4, 0.2):
        start_s, end_s = run.step(work_s, arm="warmup", epoch_start=True)
        while (start_s := start_s + 0.04) < end_s:
            run.look(MAIN, STEP, at_s=start_s, in_model=True)
    run.steps(20)
    assert run.episodes() == ()


def test_what_was_seen_once_is_not_spread() -> None:
    (found,) = evaluated(10, 1).episodes()
    assert (found.times, found.per_step_s) == (1, None)


def test_a_host_that_waits_for_a_busy_gpu_holds_nothing_up() -> None:
    run = evaluated(10, 3)
    on_the_gpu = {row.index: STEP_S for row in run.rows}
    assert run.episodes(seconds=on_the_gpu) == ()


def test_two_causes_in_one_step_share_its_time_by_their_looks() -> None:
    run = evaluated(10, 2)
    for row in [row for row in run.rows if row.num_forwards > 1]:
        for number in range(5):
            run.look(MAIN, SAVES, at_s=row.ended_at_s - 0.05 + number * 1e-3, library="checkpoint")
    run.looks.sort(key=lambda look: look.time_s)
    evaluation, checkpoint = run.episodes()
    assert (checkpoint.kind, checkpoint.place) == ("checkpoint", SAVES)
    assert evaluation.seconds == pytest.approx(2 * checkpoint.seconds)
    assert evaluation.seconds + checkpoint.seconds == pytest.approx(0.8)


def test_a_step_without_a_look_is_like_the_one_nearest_in_length() -> None:
    run = evaluated(10, 2)
    run.step(0.35, num_forwards=9)
    (found,) = run.episodes()
    assert found.times == 3
    assert found.seconds == pytest.approx(0.8 + 0.34)


def drawn(run: Run, *places: Place, took_s: float = 0.05, **changes: Any) -> None:
    """Ten steps, and one more that takes far longer, with a look at its middle or at none of its lines."""
    run.steps(10)
    start_s, _ = run.step(took_s + STEP_S)
    if places:
        run.look(MAIN, *places, at_s=start_s + took_s / 2, **changes)


def test_a_step_without_a_look_is_divided_as_all_steps_like_it_are() -> None:
    """One look at a typical line does not decide for steps whose length happens to be nearest to its own."""
    run = Run()
    for _ in range(3):
        drawn(run, CALLS)
    drawn(run, STEP, took_s=0.052)
    drawn(run, took_s=0.053)
    (found,) = run.episodes()
    assert found.times == 4
    assert found.seconds == pytest.approx(3 * 0.05 + 0.063 * 3 / 4)


@pytest.mark.parametrize("late", [{"late_s": 0.004}, {"late_s": 0.0004, "due_earlier": True}])
def test_a_look_that_came_late_to_a_typical_line_says_nothing(late: dict[str, Any]) -> None:
    run = Run()
    for _ in range(3):
        drawn(run, CALLS)
        drawn(run, STEP, **late)
    (found,) = run.episodes()
    assert (found.times, found.seconds) == (6, pytest.approx(6 * 0.05))


def test_the_first_steps_of_epochs_are_like_each_other_alone() -> None:
    run = evaluated(10, 3, epoch_start=True, begins_epoch=True)
    run.steps(5)
    for _ in range(3):
        drawn(run, SAVES, took_s=0.4)
    run.step(0.4 + STEP_S)
    stall, evaluation = run.episodes(steps_per_epoch=200.0)
    assert (evaluation.with_epoch, evaluation.times, stall.times) == (True, 3, 4)


def test_a_loop_of_its_own_is_named_by_its_first_line() -> None:
    def loops(place: Place) -> tuple[int, ...]:
        return (18, 30) if place == CALLS else (18,) if place == STEP else ()

    (found,) = evaluated(10, 2).episodes(loops=loops)
    assert found.place is not None
    assert (found.place.line, found.function) == (30, None)


def test_waits_come_in_bursts_and_are_no_episodes() -> None:
    run = Run()
    run.steps(20)
    start_s, _ = run.step(wait_s=0.5)
    run.look(MAIN, CALLS, at_s=start_s + 0.2)
    assert run.episodes() == ()


def test_a_hiccup_of_the_machine_is_no_episode() -> None:
    run = Run()
    run.steps(20)
    start_s, _ = run.step(0.5)
    run.look(MAIN, STEP, at_s=start_s + 0.2, in_model=True)
    assert run.episodes() == ()
    assert not any(row.apart for row in run.rows)


def test_the_start_of_an_epoch_is_found_in_the_loader() -> None:
    run = Run()
    for _ in range(2):
        run.steps(9)
        start_s, _ = run.step(wait_s=0.3, epoch_start=True, begins_epoch=True)
        run.look(MAIN, STEP, at_s=start_s + 0.1, library="loading", callee="__iter__", in_loader=2)
        run.look(MAIN, STEP, DRAWS, at_s=start_s + 0.2, library="loading", in_loader=2)
    (found,) = run.episodes(steps_per_epoch=10.0)
    assert (found.kind, found.place, found.with_epoch) == ("epoch-start", STEP, True)
    assert (found.samples, found.inside) == (4, DRAWS)
    assert found.per_step_s == pytest.approx(0.03)


@pytest.mark.parametrize(("library", "kind"), [("loading", "epoch-start"), (None, "other")])
def test_an_iterator_that_is_made_anew_starts_an_epoch(library: str | None, kind: str) -> None:
    run = Run()
    for _ in range(3):
        run.steps(9)
        start_s, _ = run.step(0.3, epoch_start=True, begins_epoch=True)
        run.look(MAIN, CALLS, at_s=start_s + 0.1, library=library, callee="__iter__", in_loader=2)
    (found,) = run.episodes(steps_per_epoch=10.0)
    assert (found.kind, found.place) == (kind, CALLS)


@pytest.mark.parametrize(
    ("function", "has_loader", "in_model", "library", "kind"),
    [
        ("validate", True, False, None, "evaluation"),
        ("collect", True, True, None, "rollout"),
        ("generate_negatives", True, False, None, "other"),
        ("train", False, True, None, "rollout"),
        ("train", True, True, "loading", "evaluation"),
        ("train", True, False, None, "other"),
        ("write_checkpoint", True, False, None, "checkpoint"),
        ("train", True, True, "compilation", "compilation"),
    ],
)
def test_kinds(function: str, has_loader: bool, in_model: bool, library: str | None, kind: str) -> None:
    run = Run()
    for _ in range(2):
        run.steps(9)
        start_s, _ = run.step(0.3)
        inside = Place(file="train.py", line=90, function=function)
        run.look(MAIN, CALLS, inside, at_s=start_s + 0.1, in_model=in_model, library=library)
    (found,) = run.episodes(has_loader=has_loader)
    assert found.kind == kind
    assert (found.per_step_s is None) == (kind == "compilation")


def test_set_up_is_paid_once_and_named_by_its_heaviest_line() -> None:
    run = Run()
    reads = Place(file="data.py", line=3, function="read")
    for number in range(8):
        run.look(MAIN, reads if number else CALLS, at_s=95.0 + number / 2, callee="loads")
    run.steps(8)
    (found,) = run.episodes(started_at_s=95.0)
    assert (found.kind, found.place, found.function) == ("set-up", reads, "loads")
    assert (found.seconds, found.per_step_s) == (pytest.approx(5.0), None)


def test_no_line_below_holds_half_of_the_looks() -> None:
    looks = [Look(0.0, 0.1, (MAIN, place), None, None, False) for place in (STEP, CALLS, SAVES)]
    assert heaviest(looks)[0] == (MAIN,)
    assert heaviest(looks[:1])[0] == (MAIN, STEP)
