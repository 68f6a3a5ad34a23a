"""The most likely course of a tuning: what idle nodes may run before it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from flatout.tuner.numbers import changes_for
from flatout.tuner.search.ahead import LIKELY_PAIRS, closing_units, likely_units
from flatout.tuner.search.candidates import Candidate
from flatout.tuner.search.times import Times, one_pair
from flatout.tuner.treatment import Dose, all_treatments, treatment_of
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trials import Unit
from flatout.tuner.verdict import FEWEST_PAIRS
from tests.unit.tuner.search.test_times import times
from tests.unit.tuner.test_verdict import trial

WORKERS, GARBAGE = Dose(name="loader-workers", value=2), Dose(name="garbage-every", value=100)
COMPILE, AUTOCAST = Dose(name="compile", value="default"), Dose(name="autocast", value="bfloat16")


def likely(
    doses: Sequence[Dose], found: Times, *, ceiling: float = 1.0, draws: bool | None = False
) -> list[Unit]:
    left: list[Candidate] = [(treatment_of(dose), [dose.value]) for dose in doses]
    return likely_units(
        left,
        kept=[],
        times=found,
        changes_for=functools.partial(changes_for, draws=draws),
        ceilings={"loader-bound": ceiling},
    )


def pairs(without: Sequence[Dose], with_: Sequence[Dose], number: int = LIKELY_PAIRS) -> list[Unit]:
    return [one_pair(without, with_, each) for each in range(number)]


def numbers(*doses: Dose, **changes: bool) -> list[Unit]:
    return [((doses, {"same_random": False, **changes}),)]


def in_run(found: Times, dose: Dose, kept: Sequence[Dose]) -> list[Unit]:
    return found.switched_units([dose], kept)


def test_most_treatments_gain_nothing_and_what_can_be_switched_is_timed_first(tmp_path: Path) -> None:
    found = times(tmp_path)
    wanted = [*in_run(found, GARBAGE, []), *numbers(WORKERS), *pairs([], [WORKERS])]
    assert likely([GARBAGE, WORKERS], found) == wanted
    assert likely([AUTOCAST], found) == in_run(found, AUTOCAST, [])  # then it needs many runs, or none


def test_patches_come_before_what_can_be_switched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = times(tmp_path)
    named = [name for name in all_treatments() if name != WORKERS.name]  # which is a patch, then
    monkeypatch.setattr("flatout.tuner.search.ahead.all_treatments", lambda: named)
    first = [*numbers(WORKERS), *pairs([], [WORKERS])]
    assert likely([WORKERS, GARBAGE], found) == [*first, *in_run(found, GARBAGE, [])]


def test_a_treatment_of_a_large_ceiling_is_most_likely_kept(tmp_path: Path) -> None:
    found = times(tmp_path)
    first = [*numbers(WORKERS), *pairs([], [WORKERS])]
    rest = [*in_run(found, GARBAGE, [WORKERS]), *pairs([], [WORKERS], FEWEST_PAIRS)[2:]]
    assert likely([WORKERS, GARBAGE], found, ceiling=2.0) == [*first, *rest]


def test_what_blocks_of_one_run_showed_decides_what_follows(tmp_path: Path) -> None:
    def result(names: set[str]) -> TrialResult:
        return trial(0.05 if "garbage-every 100" in names else 0.1)

    gains, gains_nothing = times(tmp_path, result), times(tmp_path, lambda names: trial(0.1))
    for each in (gains, gains_nothing):
        each.switch([GARBAGE], [])
    of_workers = [*numbers(GARBAGE, WORKERS), *pairs([GARBAGE], [GARBAGE, WORKERS])]
    whole = pairs([], [GARBAGE], FEWEST_PAIRS)
    assert likely([GARBAGE, WORKERS], gains) == [*numbers(GARBAGE), *of_workers, *whole]
    assert likely([GARBAGE], gains_nothing) == []


def test_how_numbers_are_compared_may_not_be_known_yet(tmp_path: Path) -> None:
    unknown = likely([COMPILE], times(tmp_path), draws=None)
    assert unknown == pairs([], [COMPILE])
    assert likely([COMPILE], times(tmp_path), draws=True) == [*numbers(COMPILE, same_random=True), *unknown]


def test_at_the_end_each_is_left_out_once_and_everything_is_timed(tmp_path: Path) -> None:
    found, both = times(tmp_path), [WORKERS, GARBAGE]
    whole = pairs([], both, FEWEST_PAIRS)
    assert closing_units(both, leave_out=[WORKERS], times=found) == [*pairs([GARBAGE], both), *whole]
    switched = in_run(found, GARBAGE, [WORKERS])
    assert closing_units(both, leave_out=[GARBAGE], times=found) == [*switched, *whole]
    assert (
        closing_units([WORKERS], leave_out=[], times=found, is_timed=True)
        == pairs([], [WORKERS], FEWEST_PAIRS)[2:]
    )
    assert closing_units([], leave_out=[], times=found) == []
