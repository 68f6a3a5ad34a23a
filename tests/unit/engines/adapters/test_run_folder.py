"""What a folder says about a run: how far it is, what may begin there, and what is not to be touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.adapters import run_folder
from flatout.engines.adapters.settings import AdaptSettings, make_settings, read_settings
from flatout.engines.adapters.training.records import KIND, PHASES, PhaseState, StepRecord, checkpoints_of
from flatout.engines.run.log import RunLog
from flatout.engines.run.settings import save_settings
from flatout.ground.codec import encode
from flatout.ground.errors import BadInput


def config(out: Path, **changes: Any) -> AdaptSettings:
    return make_settings({"model": "m", "out": str(out), "tasks": {"qa": {}}, **changes})


def keep(out: Path, phase: str, *, finished: bool, step: int = 5, **changes: Any) -> None:
    state = PhaseState(
        phase=phase,
        step=step,
        steps=10,
        finished=finished,
        config=encode(config(out, **changes)),
        fingerprint="abc",
        threads=1,
        elapsed_s=2.0,
    )
    files = {"training": {"w": torch.zeros(1)}, "best": {"w": torch.zeros(1)}}
    checkpoints_of(out, phase).save(step, state=state, files=files)


def test_status_says_how_far_each_phase_is(tmp_path: Path) -> None:
    keep(tmp_path, "phase1", finished=True)
    keep(tmp_path, "phase2", finished=False, step=3)
    found = run_folder.read_status(tmp_path)
    assert [(each.step, each.finished, each.steps) for each in found.phases] == [
        (5, True, 10),
        (3, False, 10),
        (None, False, None),
    ]
    assert [each.state for each in found.phases] == ["finished", "interrupted", "not begun"]
    assert found.resume == f"flatout adapt train {tmp_path} --resume"
    assert run_folder.furthest(tmp_path).state.phase == "phase2"
    kept = run_folder.latest_checkpoints(tmp_path)["phase1"]
    assert kept is not None and kept.state.phase == "phase1"
    for ask in (run_folder.read_status, run_folder.furthest):
        with pytest.raises(BadInput, match="holds no run of adapters"):
            ask(tmp_path / "absent")


def test_a_run_goes_on_while_its_log_is_written_and_is_interrupted_when_it_is_not(tmp_path: Path) -> None:
    out = tmp_path / "run one"
    with RunLog(out, KIND, settings=encode(config(out)), tensorboard=False) as log:
        assert {each.state for each in run_folder.read_status(out).phases} == {"not begun"}, (
            "it lives, and loads"
        )
        log.write(StepRecord(phase="phase1", step=9))
        log.write(StepRecord(phase="phase1", step=3))  # resumed, and there again
        found = run_folder.read_status(out)
        assert (found.phases[0].state, found.phases[0].logged_step) == ("going on", 3)
        assert (found.phases[0].step, found.resume) == (None, None)
    found = run_folder.read_status(out)
    assert found.phases[0].state == "interrupted"
    assert found.resume == f"flatout adapt train '{out}' --resume"


def test_the_folder_of_a_run_stands_for_its_config(tmp_path: Path) -> None:
    out = tmp_path / "moved"
    out.mkdir()
    with pytest.raises(BadInput, match=r"moved holds no run of adapt .*name a settings file"):
        read_settings(out)
    RunLog(out, KIND, settings=encode(config(tmp_path / "before", seed=3)), tensorboard=False).close()
    assert make_settings(read_settings(out)) == config(out, seed=3)
    save_settings(out, config(out, seed=4))  # of the last time that the run was trained
    assert make_settings(read_settings(out)) == config(out, seed=4)


def test_what_is_finished_is_not_run_again_and_what_is_begun_goes_on(tmp_path: Path) -> None:
    keep(tmp_path, "phase1", finished=True)
    keep(tmp_path, "phase2", finished=False)
    waiting, notes = run_folder.phases_to_run(config(tmp_path), PHASES, resume=True)
    assert list(waiting) == ["phase2", "phase3"]
    assert waiting["phase2"] is not None and waiting["phase3"] is None
    assert notes == ["phase1 is finished at step 5: it is not trained again"]


def test_a_phase_needs_the_ones_before_it_as_they_were(tmp_path: Path) -> None:
    keep(tmp_path, "phase1", finished=False)
    with pytest.raises(BadInput, match=r"phase2 needs phase1, which is not finished.*--phase 1 first"):
        run_folder.phases_to_run(config(tmp_path), ("phase2",), resume=False)
    keep(tmp_path, "phase1", finished=True, step=6)
    waiting, _ = run_folder.phases_to_run(config(tmp_path, phase2={"epochs": 3}), ("phase2",), resume=False)
    assert waiting == {"phase2": None}
    with pytest.raises(BadInput, match=r"the run has tasks\.qa\.rank=16, but 4 is given"):
        run_folder.phases_to_run(config(tmp_path, tasks={"qa": {"rank": 4}}), ("phase2",), resume=False)


def test_a_fresh_run_touches_nothing_that_is_there(tmp_path: Path) -> None:
    out = tmp_path / "run"
    keep(out, "phase1", finished=False)
    with pytest.raises(BadInput, match=r"phase1 in .* is begun, at step 5 .*--resume"):
        run_folder.phases_to_run(config(out), PHASES, resume=False)
    other = tmp_path / "other"
    (other / "heads-only").mkdir(parents=True)
    assert list(run_folder.phases_to_run(config(other), PHASES, resume=False)[0]) == list(PHASES)
    (other / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"not empty: it holds notes\.txt"):
        run_folder.phases_to_run(config(other), PHASES, resume=False)
    (other / "log.jsonl").write_text('{"format": "flatout-adapters-log", "version": 1}\n')
    assert run_folder.phases_to_run(config(other), PHASES, resume=False)[0]


def test_a_run_may_move(tmp_path: Path) -> None:
    keep(tmp_path, "phase1", finished=True)
    found = run_folder.settings_of(tmp_path, model="elsewhere", device="cpu")
    assert (found.model, found.out, found.device) == ("elsewhere", str(tmp_path), "cpu")
    assert run_folder.settings_of(tmp_path).model == "m"


def test_heads_alone_have_a_folder_of_their_own(tmp_path: Path) -> None:
    found = run_folder.without_adapters(config(tmp_path))
    assert found.heads_only and found.out == str(tmp_path / "heads-only")
