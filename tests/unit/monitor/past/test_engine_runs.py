"""Runs of engines, read from run.json and log.jsonl alone, beside those that were watched."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.ground.runs import CHANNEL_FILE, Run, create_run, write_run
from flatout.monitor.job.channel import read_channel
from flatout.monitor.job.reporter import Reporter
from flatout.monitor.past.engine_runs import (
    LOG_FILE,
    compare_engines,
    digest_run,
    digest_runs,
)
from tests.support.monitor import engine_run, epochs, kept_run, phases, story


def test_a_run_of_an_engine_has_its_last_figures_and_the_time_of_a_step(tmp_path: Path) -> None:
    found = digest_run(engine_run(tmp_path, epochs(0.1, 0.25, 0.5), kind="evolve"))
    assert (found.run.kind, found.state, found.run.end) == ("evolve", "ended", "finished")
    assert (found.steps, found.step_s, found.duration_s) == (3, 4.0, 12.0)
    assert found.last == {"reward_train": 0.25, "reward_heldout": 0.5, "statistics/update_norm": 0.5}
    assert found.to_json()["format"] == "flatout-run-digest"


def test_phases_add_up_and_a_step_that_was_done_again_counts_once(tmp_path: Path) -> None:
    found = digest_run(engine_run(tmp_path, phases(), kind="adapt"))
    assert (found.steps, found.duration_s) == (25, 14.0)
    assert found.step_s == pytest.approx(0.6)
    assert found.last == {"phase1/losses/qa": 1.25, "phase2/losses/qa": 0.5}


def test_a_run_without_a_log_has_what_its_header_says(tmp_path: Path) -> None:
    folder = engine_run(tmp_path, [], kind="steer")
    (folder / "log.jsonl").unlink()
    found = digest_run(folder)
    assert (found.run.kind, found.steps, found.duration_s, found.last) == ("steer", None, 90.0, {})


def test_a_run_that_died_lasted_as_long_as_it_reported(tmp_path: Path) -> None:
    run = Run(name="train", pid=os.getpid(), process_started_s=None, started_s=1e9)
    folder = create_run(run, tmp_path)
    reporter = Reporter(folder / CHANNEL_FILE)
    reporter.step()
    reporter.close()
    reported = read_channel(folder / CHANNEL_FILE)
    assert reported is not None
    write_run(folder, replace(run, started_s=reported.time_s - 42.0, process_started_s=1.0))
    found = digest_run(folder)
    assert (found.state, found.duration_s) == ("died", pytest.approx(42.0))


def test_runs_of_all_verbs_stand_in_one_list(tmp_path: Path) -> None:
    kept_run(tmp_path, story(seconds=3), pid=1, ended=True)
    engine_run(tmp_path, epochs(0.1, 0.5), kind="evolve")
    engine_run(tmp_path, phases(), kind="adapt", ended=False, pid=os.getpid())
    engine_run(tmp_path, [], kind="steer", ended=False)
    found = {each.run.kind: each for each in digest_runs(tmp_path)}
    assert found.keys() == {"watch", "evolve", "adapt", "steer"}
    assert {kind: each.state for kind, each in found.items()} == {
        "watch": "ended",
        "evolve": "ended",
        "adapt": "running",
        "steer": "died",
    }
    assert (found["evolve"].steps, found["evolve"].figure) == (2, ("reward_heldout", 0.5))
    assert (found["adapt"].steps, found["adapt"].figure) == (25, ("phase1/losses/qa", 1.25))
    assert (found["evolve"].duration_s, found["steer"].duration_s) == (8.0, None)
    document = found["evolve"].to_json()
    assert (document["kind"], document["end"], document["steps"]) == ("evolve", "finished", 2)


def test_two_runs_of_one_engine_are_compared_by_their_last_values(tmp_path: Path) -> None:
    first = engine_run(tmp_path, epochs(0.1, 0.5), kind="evolve")
    second = engine_run(tmp_path, epochs(0.1, 0.75, every_s=2.0), kind="evolve")
    found = {name: (a, b) for name, a, b in compare_engines(first, second).figures}
    assert found["reward_heldout"] == (0.5, 0.75)
    assert found["step_s"] == (4.0, 2.0)
    assert found["duration_s"] == (8.0, 4.0)


def test_runs_of_two_kinds_cannot_be_compared(tmp_path: Path) -> None:
    evolve = engine_run(tmp_path, epochs(0.1, 0.5), kind="evolve")
    adapt = engine_run(tmp_path, phases(), kind="adapt")
    with pytest.raises(BadInput, match="mean different things"):
        compare_engines(evolve, adapt)
    watched = kept_run(tmp_path, story(seconds=3), pid=1, ended=True)
    with pytest.raises(BadInput, match=r"ran evolve and .* watch: their figures"):
        compare_engines(evolve, watched)


def test_a_run_without_scores_has_no_main_figure(tmp_path: Path) -> None:
    assert digest_run(engine_run(tmp_path, [{"step": 1, "tokens_per_s": 3.0}], kind="adapt")).figure is None


def test_a_log_of_nonsense_does_not_keep_others_from_the_list(tmp_path: Path) -> None:
    folders = [
        create_run(Run(name=name, pid=1, process_started_s=1.0, started_s=1.7e9, kind="evolve"), tmp_path)
        for name in ("pipe", "deep", "words", "huge")
    ]
    os.mkfifo(folders[0] / LOG_FILE)
    (folders[1] / LOG_FILE).write_text('{"a":' * 100_000 + "\n")
    (folders[2] / LOG_FILE).write_text('{"step": 1, "elapsed_s": "soon"}\n')
    (folders[3] / LOG_FILE).write_text(f'{{"step": 1, "loss": {"9" * 400}}}\n')
    watched = create_run(Run(name="watched", pid=1, process_started_s=1.0, started_s=1.7e9), tmp_path)
    os.mkfifo(watched / CHANNEL_FILE)
    assert {each.run.name for each in digest_runs(tmp_path)} == {"pipe", "deep", "words", "huge", "watched"}
