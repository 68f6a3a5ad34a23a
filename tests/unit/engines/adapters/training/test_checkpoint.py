"""A checkpoint is whole or not there, belongs to one model, and says which file is damaged."""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path

import pytest
import torch

from flatout.engines.adapters.training import checkpoint
from flatout.engines.adapters.training.checkpoint import Progress, State
from flatout.errors import BadInput


def state(step: int = 3, **changes: object) -> State:
    made = State(
        phase="phase1",
        step=step,
        steps=100,
        finished=False,
        config={"seed": 0},
        fingerprint="abc",
        threads=1,
        progress={"qa": Progress(best_score=0.5, best_step=2, scores={"f1": 50.0})},
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def save(folder: Path, step: int = 3, **changes: object) -> Path:
    return checkpoint.save(
        folder,
        state=state(step, **changes),
        training={"w": torch.full((2,), float(step))},
        best={"w": torch.zeros(2)},
    )


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    save(tmp_path)
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.state == state()
    assert found.training()["w"].tolist() == [3.0, 3.0]
    assert found.best()["w"].tolist() == [0.0, 0.0]


def test_the_last_two_are_kept_and_partial_ones_are_nobodys(tmp_path: Path) -> None:
    for step in (1, 2, 30):
        save(tmp_path, step)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-000002", "step-000030"]
    (tmp_path / ".step-000099.partial").mkdir()
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.state.step == 30
    save(tmp_path, 31)
    assert not list(tmp_path.glob(".*"))


def test_the_same_step_once_more_changes_only_what_is_said_of_it(tmp_path: Path) -> None:
    path = save(tmp_path)
    before = (path / checkpoint.TRAINING).stat().st_mtime_ns
    save(tmp_path, finished=True)
    assert checkpoint.read_state(path).finished
    assert (path / checkpoint.TRAINING).stat().st_mtime_ns == before


def test_nothing_is_there_before_the_first(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None


def test_damage_is_named(tmp_path: Path) -> None:
    path = save(tmp_path)
    (path / checkpoint.TRAINING).write_bytes(b"\x01")
    found = checkpoint.latest(tmp_path)
    assert found is not None
    with pytest.raises(BadInput, match=r"training\.safetensors cannot be read"):
        found.training()
    (path / checkpoint.STATE).write_text("{")
    with pytest.raises(BadInput, match=r"state\.json cannot be read"):
        checkpoint.latest(tmp_path)


def test_other_formats_and_later_versions_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    written = json.loads((path / checkpoint.STATE).read_text())
    (path / checkpoint.STATE).write_text(json.dumps({**written, "version": 99}))
    with pytest.raises(BadInput, match="version 99"):
        checkpoint.latest(tmp_path)
    (path / checkpoint.STATE).write_text(json.dumps({**written, "format": "other"}))
    with pytest.raises(BadInput, match="no checkpoint of adapters"):
        checkpoint.latest(tmp_path)


def test_a_fingerprint_tells_models_apart() -> None:
    def named(value: float) -> str:
        return checkpoint.fingerprint([("w", torch.full((4, 4), value)), ("b", torch.zeros(4))])

    assert named(1.0) == named(1.0) != named(2.0)
    with pytest.raises(BadInput, match="belongs to another model than"):
        checkpoint.check_model(state(), fingerprint="xyz", model="./other", path=Path("phase1/step-000003"))
    checkpoint.check_model(state(), fingerprint="abc", model="./mine", path=Path("phase1"))


def test_a_full_disk_is_no_defect_and_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        large = {"w": torch.zeros(1 << 18)}
        with pytest.raises(BadInput, match=r"File too large.*go on with --resume"):
            checkpoint.save(tmp_path, state=state(2), training=large, best={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.state.step == 1
