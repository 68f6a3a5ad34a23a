from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flatout.ground.errors import BadInput
from flatout.planner.config.job_config import Stage, read_config
from flatout.planner.config.knobs import (
    HUGGING_FACE,
    HYDRA,
    LIGHTNING,
    PLAIN,
    Mapped,
    Style,
    find_key,
    missing_knob,
    overrides_of,
    pairs,
    read_mapping,
    recognise_style,
)
from flatout.planner.config.settings import open_config
from tests.support import planner as plans


def stage_of(folder: Path, text: str, *, name: str = "c.yaml") -> Stage:
    path = folder / name
    path.write_text(text)
    return read_config(path).stages[0]


def key(
    knob: str, stage: Stage, *, style: Style = PLAIN, keys: Mapping[str, str] | None = None
) -> str | None:
    return find_key(knob, stage, style=style, mapped=Mapped(keys=keys or {}))


@pytest.mark.parametrize(
    ("name", "text", "style", "reason"),
    [
        ("a.json", plans.HUGGING_FACE, HUGGING_FACE, "gradient_accumulation_steps at the top"),
        (
            "c.yaml",
            "per_device_train_batch_size: 4\n",
            HUGGING_FACE,
            "per_device_train_batch_size at the top",
        ),
        ("c.yaml", plans.LIGHTNING, LIGHTNING, "a trainer section and data.class_path"),
        ("c.yaml", "defaults: [_self_]\nbatch_size: 1\n", HYDRA, "c.yaml has a defaults list"),
        ("c.yaml", plans.CONFIG, PLAIN, "neither"),
    ],
)
def test_a_style_is_recognised_with_its_reason(
    name: str, text: str, style: Style, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    found = recognise_style(read_config(tmp_path / name))
    assert found.value is style
    assert reason in found.reason
    assert found.source == ("assumed" if style is PLAIN else "computed")


@pytest.mark.parametrize(
    ("text", "knob", "expected"),
    [
        ("a: {b: {batch_size: 1}}", "batch_size", "a.b.batch_size"),
        ("train: {batch_size: 1}\nval: {batch_size: 2}", "batch_size", "train.batch_size"),
        ("train: {batch_size: 1}\nval: {batch_size: 2}", "eval_batch_size", "val.batch_size"),
        ("batch_size: 1\neval_batch_size: 2", "eval_batch_size", "eval_batch_size"),
        ("batch_size: 1\nmicro_batch_size: 2", "batch_size", "micro_batch_size"),
        ("batch_size: 1", "eval_batch_size", None),
        ("value_head: {batch_size: 1}\ntestLoader: {batch_size: 2}", "batch_size", "value_head.batch_size"),
        ("optim: {lr: 1}", "learning_rate", "optim.lr"),
        ("train: {batch_size: 1, grad_accum: 4}", "accumulation", "train.grad_accum"),
        ("batch_size: 1\naccum_iter: 4", "accumulation", "accum_iter"),
        ("x: {my_knob: 1}", "my_knob", "x.my_knob"),
    ],
)
def test_a_knob_is_found_by_its_last_name(text: str, knob: str, expected: str | None, tmp_path: Path) -> None:
    assert key(knob, stage_of(tmp_path, text)) == expected


def test_two_candidates_are_a_question(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, "a: {batch_size: 1}\nb: {batch_size: 2}")
    with pytest.raises(
        BadInput, match=r"batch_size could be a.batch_size or b.batch_size .*--knob batch_size="
    ):
        key("batch_size", stage)
    assert key("batch_size", stage, keys={"batch_size": "b.batch_size"}) == "b.batch_size"


def test_a_named_key_that_is_not_there(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, "data: {batch_size: 1}")
    with pytest.raises(
        BadInput, match=r"batch_size=data.batch: the config has no such key .*data.batch_size"
    ):
        key("batch_size", stage, keys={"batch_size": "data.batch"})


def test_fixed_keys_go_before_last_names(tmp_path: Path) -> None:
    text = "data: {init_args: {batch_size: 1}, other: {batch_size: 2}}\ntrainer: {precision: 32}\n"
    assert key("batch_size", stage_of(tmp_path, text), style=LIGHTNING) == "data.init_args.batch_size"


def test_what_is_missing_is_named_with_what_was_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("batchsize: 4\n")
    config = read_config(path)
    error = missing_knob("batch_size", config.stages[0], config=config, style=PLAIN)
    assert error.message.startswith("c.yaml has no batch_size (looked for per_device_train_batch_size, ")
    assert error.hint == "nearest: batchsize; name it with --knob batch_size=KEY"


def test_a_key_without_a_value_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data:\n  batch_size:\n")
    config = read_config(path)
    error = missing_knob("batch_size", config.stages[0], config=config, style=PLAIN)
    assert error.message == "data.batch_size of c.yaml has no value"


def test_a_mapping_file(tmp_path: Path) -> None:
    path = tmp_path / "flatout-plan.toml"
    path.write_text(
        'model = "pkg.plan:build"\nstages = "s/*.yaml"\nranks = 2\n[knobs]\nbatch_size = "a.b"\nn = "c"\n'
    )
    assert read_mapping(path) == Mapped(
        model="pkg.plan:build", stages="s/*.yaml", ranks=2, keys={"batch_size": "a.b", "n": "c"}
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = ", "is not valid TOML"),
        ("modell = 'x'", "modell is not a known entry"),
        ("ranks = 'two'", "ranks must be int"),
        ("[knobs]\nbatch_size = 4", "knobs.batch_size must be a dotted key"),
        ("knobs = 'x'", "knobs must be dict"),
    ],
)
def test_a_mapping_file_that_cannot_be_used(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        read_mapping(path)


def test_a_mapping_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no mapping file at"):
        read_mapping(tmp_path / "absent.toml")


def test_pairs_of_the_command_line() -> None:
    assert pairs(["a=b.c", " d = e "], flag="--knob") == {"a": "b.c", "d": "e"}
    values: dict[str, Any] = overrides_of(["a=16", "b=2e-4", "c=true", "d='16'", "e=", "f=x=y"])
    assert values == {"a": 16, "b": 2e-4, "c": True, "d": "16", "e": None, "f": "x=y"}


@pytest.mark.parametrize(
    ("flag", "pair"), [("--knob", "batch_size"), ("--knob", "a="), ("--set", "=3"), ("--set", "x")]
)
def test_a_pair_that_is_none(flag: str, pair: str) -> None:
    with pytest.raises(BadInput, match=f"{flag} '{pair}' is not NAME=VALUE"):
        pairs([pair], flag=flag)


def test_a_knob_whose_name_ends_in_val_is_no_evaluation() -> None:
    from flatout.planner.config.knobs import is_evaluation

    assert not is_evaluation("training.trainer.gradient_clip_val")
    assert is_evaluation("val.gradient_clip_val")


def test_a_section_in_the_place_of_a_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cli.yaml").write_text(
        plans.LIGHTNING.replace("accumulate_grad_batches: 2", "accumulate_grad_batches: {0: 8, 4: 4}")
    )
    opened = open_config(tmp_path / "cli.yaml")
    with pytest.raises(BadInput, match=r"accumulation at trainer.accumulate_grad_batches holds several"):
        opened.settings()
    one = open_config(tmp_path / "cli.yaml", knobs=["accumulation=trainer.accumulate_grad_batches.0"])
    assert one.settings().stages[0].accumulation.value == 8
    (tmp_path / "c.yaml").write_text("batch_size: [4, 8]\n")
    with pytest.raises(BadInput, match=r"batch_size at batch_size holds several values"):
        open_config(tmp_path / "c.yaml").settings()
