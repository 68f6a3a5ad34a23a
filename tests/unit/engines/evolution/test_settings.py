"""Settings: every key is known, every value is checked, and a resumed run keeps what it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatout.codec import encode
from flatout.engines.evolution.settings import FREE_TO_CHANGE, NAMES, make_config, read_file, resumed
from flatout.errors import BadInput

LEAST: dict[str, Any] = {"model": "m", "task": "digit-copy"}


def test_a_file_gives_the_keys_it_has(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("task: digit-copy\ntask_options: {length: 2}\nsigma: 1e-3\ntargets: ['*.mlp.*']\n")
    config = make_config({**read_file(path), "model": "m"})
    assert (config.sigma, config.targets, config.task_options) == (0.001, ("*.mlp.*",), {"length": 2})
    path.write_text("")
    assert read_file(path) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sigm: 1", "did you mean sigma?"),
        ("- 1", "write a table of keys"),
        ("a: [", "cannot be read"),
        ("wholly_unlike: 1", "known: model"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as error:
        read_file(path)
    assert said in str(error.value) and "run.yaml" in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no settings file at"):
        read_file(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"population": 7}, "odd"),
        ({"population": 0}, "below 2"),
        ({"sigma": 0}, "sigma=0"),
        ({"epochs": 0, "lr": -1}, "epochs=0 is below 1; lr=-1"),
        ({"population": "many"}, "population"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"model": None}, "no model"),
        ({"task": None}, "no task"),
        ({"epoch": 3}, "did you mean epochs?"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as error:
        make_config({**LEAST, **wrong})
    assert said in str(error.value)


def test_a_resumed_run_keeps_its_settings() -> None:
    saved = encode(make_config({**LEAST, "sigma": 0.5, "epochs": 3}))
    assert resumed(saved, {"out": "evolution", "epochs": 9}).epochs == 9
    assert resumed(saved, {"sigma": 0.5}).sigma == 0.5
    with pytest.raises(BadInput, match=r"the run has sigma=0\.5, and 0\.1 is given"):
        resumed(saved, {"sigma": 0.1})


def test_what_may_change_are_settings() -> None:
    assert set(NAMES) > FREE_TO_CHANGE
