"""Settings: every key is known, every value is checked, and a resumed run keeps what it began with."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.evolution.settings import (
    FREE_TO_CHANGE,
    INTEGER_LR,
    EvolveSettings,
    choose_step_sizes,
    make_settings,
    read_settings,
    resume_settings,
    step_size_at,
    steps_at,
)
from flatout.ground.codec import encode
from flatout.ground.errors import BadInput
from flatout.multiplex.models.families import read_decoder
from tests.support.multiplex import tiny_model

LEAST: dict[str, Any] = {"model": "m", "task": "digit-copy"}


def test_a_file_gives_the_keys_it_has(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("task: digit-copy\ntask_options: {length: 2}\nsigma: 1e-3\ntargets: ['*.mlp.*']\n")
    made = make_settings({**read_settings(path), "model": "m"})
    assert (made.sigma, made.targets, made.task_options) == (0.001, ("*.mlp.*",), {"length": 2})
    path.write_text("")
    assert read_settings(path) == {}


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
        read_settings(path)
    assert said in str(error.value) and "run.yaml" in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no settings file at"):
        read_settings(tmp_path / "absent.yaml")


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
        make_settings({**LEAST, **wrong})
    assert said in str(error.value)


def test_a_resumed_run_keeps_its_settings() -> None:
    saved = encode(make_settings({**LEAST, "sigma": 0.5, "epochs": 3}))
    assert resume_settings(saved, {"out": "evolution", "epochs": 9}).epochs == 9
    assert resume_settings(saved, {"sigma": 0.5}).sigma == 0.5
    with pytest.raises(BadInput, match=r"the run has sigma=0\.5, but 0\.1 is given"):
        resume_settings(saved, {"sigma": 0.1})


def test_what_may_change_are_settings() -> None:
    assert {field.name for field in fields(EvolveSettings)} > FREE_TO_CHANGE


def settings(**given: object) -> EvolveSettings:
    return EvolveSettings(model="m", task="digit-copy", **given)  # type: ignore[arg-type]


def test_step_sizes_follow_their_schedule_and_nothing_else() -> None:
    def of(how: Any, end: float) -> list[float]:
        return [step_size_at(2.0, how=how, end=end, epoch=epoch, epochs=4) for epoch in (0, 1, 2, 4, 9)]

    assert of("constant", 0.1) == [2.0] * 5
    assert of("linear", 0.5) == pytest.approx([2.0, 1.75, 1.5, 1.0, 1.0])
    assert of("cosine", 0.0) == pytest.approx([2.0, 1.7071, 1.0, 0.0, 0.0], abs=1e-4)
    settings = make_settings({**LEAST, "sigma": 0.5, "lr": 1.0, "lr_schedule": "linear", "epochs": 10})
    assert steps_at(settings, 5) == (0.5, 0.5)
    longer = make_settings({**encode(settings), "schedule_epochs": 10, "epochs": 20})
    assert steps_at(longer, 5) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sigma_schedule", "linear", "int8 arithmetic has one sigma"),
        ("optimizer", "adamw", "optimizer and weight_decay are for float"),
        ("weight_decay", 0.1, "optimizer and weight_decay are for float"),
        ("shaping", "ranks", "counts the sign of each pair"),
    ],
)
def test_integers_take_no_setting_that_they_would_ignore(name: str, value: object, said: str) -> None:
    make_settings({**LEAST, name: value})
    with pytest.raises(BadInput, match=said):
        make_settings({**LEAST, name: value, "arithmetic": "int8"})


def test_sigma_follows_the_spread_of_the_weights() -> None:
    decoder = read_decoder(tiny_model("llama"))
    before = choose_step_sizes(settings(), decoder)
    with torch.no_grad():
        for product in decoder.projections().values():
            product.weight.mul_(10)
    after = choose_step_sizes(settings(), decoder)
    assert 9 < after.sigma.value / before.sigma.value < 11
    assert after.lr.value > after.sigma.value
    assert "3%" in after.sigma.reason


def test_what_is_given_stays() -> None:
    decoder = read_decoder(tiny_model("llama"))
    steps = choose_step_sizes(settings(sigma=0.5, lr=0.25), decoder)
    assert (steps.sigma.value, steps.lr.value) == (0.5, 0.25)
    assert steps.sigma.source == "assumed"


def test_integers_move_by_shares() -> None:
    decoder = read_decoder(tiny_model("llama"))
    assert choose_step_sizes(settings(arithmetic="int8"), decoder).lr.value == INTEGER_LR
