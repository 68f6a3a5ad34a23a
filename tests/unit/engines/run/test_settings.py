"""Settings are read from files and run folders, checked by name and range, and kept for a resume."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flatout.engines.run.settings import (
    check_resume,
    make_settings,
    out_of_range,
    read_settings,
    save_settings,
    with_setting,
)
from flatout.ground.codec import encode
from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    steps: int = 10
    lr: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    model: str
    sigma: float | None = None
    names: tuple[str, ...] = ()
    phase: Part = field(default_factory=Part)
    parts: dict[str, Part] = field(default_factory=dict)
    out: str | None = None


def read(path: Path) -> dict[str, Any]:
    return read_settings(path, Whole, verb="evolve")


def make(**given: Any) -> Whole:
    return make_settings(Whole, {"model": "m", **given}, verb="evolve", needed=("model",))


def test_known_keys_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("sigma: 0.5\nparts: {a: {steps: 3}}\n")
    assert read(path) == {"sigma": 0.5, "parts": {"a": {"steps": 3}}}
    path.write_text("")
    assert read(path) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sigm: 1", "'sigm', which is not a setting of evolve .did you mean sigma"),
        ("- 1", "holds a list"),
        ("a: [", "cannot be read"),
        pytest.param("a: " + "[" * 3000, "run.yaml cannot be read: maximum recursion depth", id="deep"),
        ("x: 1", "known: model, sigma"),
        ("phase: {step: 1}", "'step', which is not a setting of evolve's phase .did you mean steps"),
        ("parts: {a: {x: 1}}", "not a setting of evolve's parts.a"),
    ],
)
def test_anything_else_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=said) as raised:
        read(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(BadInput, match="no settings file at"):
        read(tmp_path / "nowhere.yaml")


def test_a_run_folder_stands_for_its_settings(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no run of evolve"):
        read(tmp_path)
    header = {"format": "any-log", "version": 1, "settings": {"model": "old", "out": "elsewhere"}}
    (tmp_path / "log.jsonl").write_text(json.dumps(header) + "\n")
    assert read(tmp_path) == {"model": "old", "out": str(tmp_path)}
    settings = make(names=("a", "b"), parts={"q": {"lr": 0.5}})
    save_settings(tmp_path, settings)
    found = read(tmp_path)
    assert found == {**encode(settings), "out": str(tmp_path)}
    assert make_settings(Whole, found, verb="evolve").parts == {"q": Part(lr=0.5)}
    (tmp_path / "settings.json").write_text('{"trials": 3}')
    with pytest.raises(BadInput, match="holds no run of evolve"):
        read(tmp_path)


def test_settings_are_made_from_what_is_given() -> None:
    assert make(sigma=1, names=["a"]) == Whole(model="m", sigma=1.0, names=("a",))
    with pytest.raises(BadInput, match=r"no model is given .*--model"):
        make(model=None)
    with pytest.raises(BadInput, match=r"settings\.phase\.steps is str"):
        make(phase={"steps": "ten"})
    with pytest.raises(BadInput, match="did you mean sigma"):
        make(sgma=1)


def test_one_more_setting_may_be_of_a_nested_table() -> None:
    given = with_setting({"model": "m"}, "phase.steps", 3)
    assert with_setting(given, "phase.lr", 1.0)["phase"] == {"steps": 3, "lr": 1.0}
    with pytest.raises(BadInput, match="'model' is not a table"):
        with_setting(given, "model.x", 1)


def test_a_resumed_run_may_change_what_is_free_and_nothing_else() -> None:
    saved = encode(make(sigma=0.5, out="here"))
    check_resume(saved, make(sigma=0.5, out="there"), free={"out"})
    check_resume({"model": "m"}, make(sigma=0.7), free=())  # saved before there was a sigma
    with pytest.raises(BadInput, match=r"the run has sigma=0\.5, but 0\.7 is given .*omit it"):
        check_resume(saved, make(sigma=0.7), free={"out"})
    with pytest.raises(BadInput, match=r"the run has phase\.steps=10, but 3 is given"):
        check_resume(saved, make(sigma=0.5, phase={"steps": 3}), free={"out"})


def test_every_number_out_of_its_range_is_named() -> None:
    settings = make(sigma=-1.0, phase={"steps": 0}, parts={"q": {"lr": 2.0}})
    wrong = out_of_range(settings, at_least={"steps": 1}, above_zero={"sigma"}, shares={"lr"})
    assert wrong == [
        "sigma=-1.0 is not above 0",
        "phase.steps=0 is below 1",
        "parts.q.lr=2.0 is not between 0 and 1",
    ]
    assert out_of_range(settings, shares={"lr"}, skip={"parts"}) == []
    assert out_of_range(make(), above_zero={"sigma"}) == []


def test_a_number_without_end_is_in_no_range() -> None:
    endless = make(sigma=math.inf, phase={"lr": math.nan}, parts={"q": {"lr": -math.inf}})
    assert out_of_range(endless, above_zero={"sigma"}) == [
        "sigma=inf is not finite",
        "phase.lr=nan is not finite",
        "parts.q.lr=-inf is not finite",
    ]
    assert out_of_range(make(phase={"steps": 10**400})) == []
