"""Settings of a search: read, refused by name, kept in the run's folder."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.run.settings import save_settings
from flatout.engines.steering.extract.positions import read_position
from flatout.engines.steering.settings import (
    FREE_TO_CHANGE,
    SearchSettings,
    make_settings,
    read_layers,
    read_range,
    read_settings,
    resume_settings,
)
from flatout.ground.errors import BadInput

GIVEN: dict[str, Any] = {"model": "m", "questions": "q.jsonl"}


def test_what_is_given_replaces_the_default() -> None:
    settings = make_settings(
        {**GIVEN, "out": "steering", "trials": 7, "methods": ["pca"], "layers": 3, "position": -2}
    )
    assert (settings.trials, settings.methods, settings.layers, settings.position) == (7, ("pca",), "3", "-2")
    assert settings.store_folder == Path("steering/activations")
    assert settings.vectors_folder == Path("steering/vectors")
    assert settings.study_name == "steering"


@pytest.mark.parametrize(
    ("text", "layers"), [("all", "all"), ("3", [3]), ("4-6", [4, 5, 6]), ("9,1,3-4", [1, 3, 4, 9])]
)
def test_layers_are_read(text: str, layers: object) -> None:
    assert read_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "5-3", "-1", "1,,2", "1-2-3"])
def test_other_layers_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_layers(text)


def test_ranges_are_read() -> None:
    assert read_range("-0.5:1") == [-0.5, 1.0]
    for text in ("1", "a:b", ":"):
        with pytest.raises(BadInput, match="is not a range"):
            read_range(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trials": 0, "rungs": 0}, "trials=0 is below 1; rungs=0 is below 1"),
        ({"shares": [0.5, 0.5]}, "three numbers above 0"),
        ({"strength": [1.0, 1.0]}, "is not a lowest and a highest number"),
        ({"trails": 3}, "did you mean trials"),
        ({"trials": "many"}, "settings.trials is str"),
        ({"model": None}, "no model is given"),
        ({"methods": []}, "is empty"),
        ({"modes": ["ad"]}, "'ad', expected one of ('add', 'project-out', "),
        ({"where": ["everywhere"]}, "'everywhere', expected one of"),
        ({"position": "first"}, "'first' is not a position"),
        ({"methods": ["pca", "caa"]}, "no method 'caa', only mean-difference, pca"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        make_settings({**GIVEN, **changes})
    assert words in str(caught.value)


@pytest.mark.parametrize("position", ["last", "mean", "-2", "3:8", "-5:-1", "first", "1:2:3", "", "2.5"])
def test_positions_are_those_that_can_be_read(position: str) -> None:
    try:
        read_position(position)
    except BadInput:
        with pytest.raises(BadInput, match="is not a position"):
            make_settings({**GIVEN, "position": position})
    else:
        assert make_settings({**GIVEN, "position": position}).position == position


def test_a_run_keeps_its_settings_and_only_some_may_change(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    first = resume_settings({**GIVEN, "out": out, "trials": 5, "seed": 3})
    save_settings(first.folder, first)
    again = resume_settings({"out": out, "trials": 9})
    assert (again.trials, again.seed, again.model) == (9, 3, "m")
    with pytest.raises(BadInput, match="has seed=3, but 4 is given"):
        resume_settings({"out": out, "seed": 4})
    assert set(FREE_TO_CHANGE) < {each.name for each in fields(SearchSettings)}
    assert make_settings(read_settings(tmp_path / "run")) == first


def test_a_search_without_a_folder_keeps_activations_for_all(tmp_path: Path) -> None:
    settings = make_settings({**GIVEN, "strength": "-0.5:1"})
    assert settings.strength == (-0.5, 1.0)
    assert settings.store_folder.parts[-2:] == (".flatout", "activations")
    with pytest.raises(BadInput, match="no run folder"):
        _ = settings.folder


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    with pytest.raises(BadInput, match="no settings file at"):
        read_settings(path)
    for content, words in (("[1]", "holds a list"), ("a: [", "cannot be read"), ("x: 1", "sets 'x'")):
        path.write_text(content)
        with pytest.raises(BadInput, match=words):
            read_settings(path)
    path.write_text("")
    assert read_settings(path) == {}
