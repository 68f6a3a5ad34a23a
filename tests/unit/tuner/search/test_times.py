"""What is measured of times, with trials whose results are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.tuner.search.times import NOISE, CannotBeTimed, Times, one_pair
from flatout.tuner.treatment import Dose
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.verdict import CLEAR_PAIRS, FEWEST_PAIRS, MOST_PAIRS
from tests.unit.tuner.search.test_tune import GivenTrials
from tests.unit.tuner.test_treatment import evidence
from tests.unit.tuner.test_verdict import trial

WORKERS, THREADS = Dose(name="loader-workers", value=2), Dose(name="threads", value=1)


def faster(names: set[str]) -> TrialResult:
    return trial(0.1 / (2 if "loader-workers 2" in names else 1) / (1.5 if "threads 1" in names else 1))


def times(folder: Path, result: object = faster, *, within_s: float | None = None) -> Times:
    said: list[str] = []
    given = GivenTrials(folder, result)  # type: ignore[arg-type]
    return Times(given, evidence(), within_s=within_s, say=said.append)  # type: ignore[arg-type]


def test_arms_take_turns_until_the_answer_is_settled(tmp_path: Path) -> None:
    assert one_pair([], [WORKERS], 1) == tuple(reversed(one_pair([], [WORKERS], 0)))
    found = times(tmp_path)
    gain = found.gain([], [WORKERS], label="workers")
    assert gain.ratio == pytest.approx(2.0, rel=0.05) and gain.num_pairs == CLEAR_PAIRS
    plain, treated = found.pairs["workers"][1]  # which began with the treatment
    assert plain.blocks_s[0] > treated.blocks_s[0]
    assert found.gain([], [], label="nothing").num_pairs <= MOST_PAIRS


def test_a_trial_that_fails_cannot_be_timed(tmp_path: Path) -> None:
    def result(names: set[str]) -> TrialResult:
        return trial(ended="crashed", error="ValueError: x") if names else trial(0.1)

    found = times(tmp_path, result)
    with pytest.raises(CannotBeTimed, match="ValueError: x"):
        found.gain([], [WORKERS], label="workers")
    assert found.gain_beside(WORKERS, [], [WORKERS]) is None
    with pytest.raises(BadInput, match="no loss was seen"):
        times(tmp_path, lambda names: trial(losses=())).job_against_itself()


def test_what_can_be_switched_is_measured_in_one_run(tmp_path: Path) -> None:
    found = times(tmp_path)
    found.switch([THREADS], [WORKERS])
    assert found.trials.num_run == 1 and found.in_run_on == [WORKERS]
    assert found.in_run["threads 1"].ratio == pytest.approx(1.5) and found.noise_in_run is not None
    beside = found.gain_beside(THREADS, [WORKERS], [WORKERS, THREADS])
    assert beside is not None and beside.ratio == pytest.approx(1.5) and found.trials.num_run == 2


def test_few_pairs_are_run_when_time_is_short(tmp_path: Path) -> None:
    late, early = times(tmp_path, within_s=0.0), times(tmp_path, within_s=1e6)
    assert len(late.job_against_itself()) == len(late.pairs[NOISE]) == 2
    assert len(early.job_against_itself()) == FEWEST_PAIRS
    assert late.is_late(num_trials=1) and not early.is_late(num_trials=1)


def test_nothing_starts_that_would_end_in_the_time_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("flatout.tuner.search.times.time.monotonic", lambda: clock[0])

    def result(names: set[str]) -> TrialResult:
        clock[0] += 10.0
        return trial(0.1 if names else 0.12)  # a gain that two pairs do not show

    found = times(tmp_path, result, within_s=140.0)
    found.job_against_itself()
    assert clock[0] == 140.0  # four trials, ten left
    found.set_aside([], at_end=True)
    assert found.trials.ends_s == pytest.approx(240.0 - 20.0 * FEWEST_PAIRS, abs=0.1)
    assert not found.is_late(num_trials=3) and found.is_late(num_trials=5)
    assert found.gain([], [WORKERS], label="workers").num_pairs == CLEAR_PAIRS
    assert clock[0] == 180.0 and found.is_up()
    found.set_aside([], at_end=False)
    assert not found.is_up()
    assert found.total([WORKERS], label="all").num_pairs == FEWEST_PAIRS
    assert clock[0] == 240.0


def test_trials_beside_each_other_take_the_time_of_one_start_and_of_all_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("flatout.tuner.search.times.time.monotonic", lambda: clock[0])

    def result(names: set[str]) -> TrialResult:
        clock[0] += 10.0
        return trial(1.0, before_s=9.0, num_steps_before=2)  # seven seconds before its first step

    found = times(tmp_path, result, within_s=100.0)
    found.job_against_itself()
    assert clock[0] == 140.0  # sixty seconds are left
    found.set_aside([], at_end=False)
    assert not found.is_late(num_beside=5) and found.is_late(num_beside=7)
    found.trials.at_once = 8
    assert not found.is_late(num_beside=14) and found.is_late(num_beside=17)  # 2 × 7 s + 3 s each
    assert not found.is_late(num_pairs=3, num_beside=8) and found.is_late(num_pairs=4, num_beside=8)


def test_one_run_of_the_job_against_itself_is_nudged_and_counts(tmp_path: Path) -> None:
    found = times(tmp_path)
    asked: list[dict[str, object]] = []
    real = found.trials.run

    def run(doses: object, **changes: object) -> TrialResult:
        asked.append(changes)
        return real(doses, **changes)  # type: ignore[arg-type]

    found.trials.run = run  # type: ignore[method-assign]
    pairs = found.job_against_itself()
    assert len(asked) == 2 * len(pairs) and [bool(each.get("nudge")) for each in asked].count(True) == 1
    assert found.nudged is pairs[1][1]


def test_what_seems_to_gain_nothing_gets_no_more_than_its_share_of_a_short_time(tmp_path: Path) -> None:
    noisy = iter([0.1, 0.09, 0.1, 0.12, 0.1, 0.13] * 4)  # no gain, and too noisy to be sure

    def result(names: set[str]) -> TrialResult:
        return trial(next(noisy))

    assert times(tmp_path, result, within_s=1e6).gain([], [], label="x").num_pairs == FEWEST_PAIRS
    assert times(tmp_path, result).gain([], [], label="x").num_pairs == MOST_PAIRS


def test_the_pairs_of_everything_kept_go_on_until_its_interval_is_narrow(tmp_path: Path) -> None:
    steps_s = iter([1.0, 0.02, 0.017, 1.0, 1.0, 0.0185, 0.0185, 1.0] + [1.0, 0.0185, 0.0185, 1.0] * 2)
    found = times(tmp_path, lambda _names: trial(next(steps_s)))
    alone = found.gain([], [WORKERS], label=str(WORKERS))
    assert alone.is_kept and alone.num_pairs == CLEAR_PAIRS and alone.high > 2 * alone.ratio
    total = found.total([WORKERS], label="all")
    assert total.is_precise and FEWEST_PAIRS < total.num_pairs <= MOST_PAIRS
    assert total.high < 1.1 * total.ratio
    assert found.trials.num_run == 2 * total.num_pairs  # those of the treatment alone count


def test_pairs_beside_another_treatment_are_not_the_total_of_one(tmp_path: Path) -> None:
    found = times(tmp_path)
    found.gain([THREADS], [THREADS, WORKERS], label=str(WORKERS))
    assert found.pairs_of_one([WORKERS]) == [] and found.pairs_of_one([THREADS, WORKERS]) == []
    found.gain([], [WORKERS], label=str(WORKERS))
    assert len(found.pairs_of_one([WORKERS])) == CLEAR_PAIRS
