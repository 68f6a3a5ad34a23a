"""Tables of known keys: a wrong one is named with its nearest, and a phase that goes on keeps its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatout.engines.adapters.settings import (
    AdaptSettings,
    check_resume,
    make_settings,
    read_settings,
)
from flatout.ground.codec import encode
from flatout.ground.errors import BadInput


def given(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "tasks": {"sentiment": {"rank": 4}, "qa": None}, **changes}


def refusal(**changes: Any) -> str:
    with pytest.raises(BadInput) as caught:
        make_settings(given(**changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_missing_has_its_default() -> None:
    config = make_settings(given(phase1={"steps": 7}))
    assert (config.phase1.steps, config.phase1.lr) == (7, 5e-4)
    assert config.tasks["sentiment"].rank == 4
    assert config.tasks["qa"].rank == 16
    assert (config.phase3.single_task_first, config.phase3.single_task_last) == (0.8, 0.2)


@pytest.mark.parametrize(
    ("changes", "nearest"),
    [
        ({"sed": 1}, "did you mean seed?"),
        ({"phase1": {"step": 1}}, "did you mean steps?"),
        ({"tasks": {"qa": {"rnk": 1}}}, "did you mean rank?"),
        ({"router": {"topk": 1}}, "did you mean top_k?"),
    ],
)
def test_a_key_that_does_not_exist_is_named_with_its_nearest(changes: dict[str, Any], nearest: str) -> None:
    assert nearest in refusal(**changes)


def test_every_value_out_of_range_is_named() -> None:
    said = refusal(phase1={"steps": 0, "lr": 0.0}, tasks={"qa": {"rank": 0, "dropout": 1.0}})
    for part in ("phase1.steps=0", "phase1.lr=0.0", "tasks.qa.rank=0", "tasks.qa.dropout=1.0"):
        assert part in said


def test_wrong_types_and_what_is_needed() -> None:
    assert "settings.phase1.steps is str" in refusal(phase1={"steps": "many"})
    assert "no tasks are given" in refusal(tasks={})
    with pytest.raises(BadInput, match="no model is given"):
        make_settings({"tasks": {"qa": {}}})


def test_a_file_is_named_in_the_message(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ntasks:\n  qa:\n    rank: 3\nphase2:\n  epoch: 1\n")
    with pytest.raises(BadInput, match=r"run\.yaml sets 'epoch', which is not a setting of adapt's phase2"):
        read_settings(path)
    path.write_text("model: m\ntasks:\n  qa:\n    rank: 3\n")
    assert make_settings(read_settings(path)).tasks["qa"].rank == 3


def test_a_config_survives_json() -> None:
    config = make_settings(given(router={"hidden": [8, 4]}, tasks={"qa": {"targets": ["query"]}}))
    assert make_settings(encode(config)) == config


def test_a_phase_that_goes_on_keeps_what_it_rests_on() -> None:
    saved = encode(make_settings(given()))

    def changed(**changes: Any) -> AdaptSettings:
        return make_settings(given(**changes))

    check_resume(saved, changed(out="elsewhere", log_every=1, phase2={"epochs": 1}), phase="phase1")
    with pytest.raises(BadInput, match=r"the run has phase1\.steps=1000, but 5 is given"):
        check_resume(saved, changed(phase1={"steps": 5}), phase="phase1")
    check_resume(saved, changed(phase1={"steps": 5}), phase="phase2")
    with pytest.raises(BadInput, match=r"tasks\.sentiment\.rank=4, but 8"):
        check_resume(saved, changed(tasks={"sentiment": {"rank": 8}, "qa": {}}), phase=None)
