from __future__ import annotations

from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.planner.config.config_text import is_hydra, package_header, parse_document
from flatout.planner.config.hydra import hydra_layers
from flatout.planner.config.job_config import read_config


def write(root: Path, **files: str) -> Path:
    """Files by name, with `__` for a slash; the config's path."""
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "config.yaml"


def layers(root: Path, **files: str) -> tuple[list[tuple[str, str]], list[str]]:
    notes: list[str] = []
    found = hydra_layers(write(root, **files), root=root, notes=notes)
    return [(str(layer.path.relative_to(root)), layer.package) for layer in found], notes


def test_a_defaults_list_makes_a_config_hydra() -> None:
    for text, expected in (("defaults: [a]", True), ("defaults: {a: 1}", False), ("a: 1", False)):
        assert is_hydra(parse_document(text, name="c", format="yaml")) is expected


@pytest.mark.parametrize(
    ("header", "package"),
    [
        ("# @package _global_", ""),
        ("# @package a.b", "a.b"),
        ("# @package _group_", None),
        ("# package x", None),
    ],
)
def test_the_header_names_the_package(header: str, package: str | None) -> None:
    assert package_header(parse_document(f"{header}\na: 1", name="c", format="yaml")) == package


def test_groups_come_in_order_and_the_file_itself_last(tmp_path: Path) -> None:
    found, notes = layers(
        tmp_path,
        config="defaults:\n  - model: big\n  - data: text\nlr: 1\n",
        model__big="a: 1",
        data__text="batch_size: 4",
    )
    assert found == [("model/big.yaml", "model"), ("data/text.yaml", "data"), ("config.yaml", "")]
    assert notes == []


def test_self_says_where_the_file_itself_comes(tmp_path: Path) -> None:
    found, _ = layers(tmp_path, config="defaults:\n  - _self_\n  - model: big\n", model__big="a: 1")
    assert found == [("config.yaml", ""), ("model/big.yaml", "model")]


def test_packages_of_entries_and_headers(tmp_path: Path) -> None:
    found, _ = layers(
        tmp_path,
        config="defaults:\n  - data@train: text\n  - data@_global_: text\n  - experiment: one\n  - base\n",
        data__text="a: 1",
        experiment__one="# @package _global_\nb: 1\n",
        base="c: 1",
    )
    assert found == [
        ("data/text.yaml", "train"),
        ("data/text.yaml", ""),
        ("experiment/one.yaml", ""),
        ("base.yaml", ""),
        ("config.yaml", ""),
    ]


def test_defaults_of_defaults_overrides_and_several_options(tmp_path: Path) -> None:
    found, notes = layers(
        tmp_path,
        config="defaults:\n- model: big\n- callbacks: [one, two]\n- override model: small\n- data: null\n",
        model__big="a: 1",
        model__small="defaults:\n  - optimizer: adam\n  - /data: text\n",
        model__optimizer__adam="lr: 1",
        callbacks__one="a: 1",
        callbacks__two="a: 1",
        data__text="batch_size: 2",
    )
    assert found == [
        ("model/optimizer/adam.yaml", "model.optimizer"),
        ("data/text.yaml", "data"),
        ("model/small.yaml", "model"),
        ("callbacks/one.yaml", "callbacks"),
        ("callbacks/two.yaml", "callbacks"),
        ("config.yaml", ""),
    ]
    assert notes == []


def test_what_only_hydra_can_resolve_is_left_out_with_a_note(tmp_path: Path) -> None:
    found, notes = layers(
        tmp_path,
        config='defaults: [{model: registered}, {optional data: absent}, {hydra/launcher: a}, {task: "???"}]',
    )
    assert found == [("config.yaml", "")]
    assert notes == [
        "defaults of config.yaml: there is no model/registered.yaml; its values are unknown",
        "defaults of config.yaml: task: ??? is chosen at launch",
    ]


def test_defaults_that_go_in_a_circle(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="go in a circle"):
        layers(tmp_path, config="defaults: [a]", a="defaults: [b]", b="defaults: [a]")


TEMPLATE = {
    "config": "defaults:\n- _self_\n- data: small\n- trainer: one\n- experiment: null\n",
    "data__small": "batch_size: 8",
    "data__large": "batch_size: 64",
    "trainer__one": "devices: 1",
    "trainer__four": "defaults: [one, _self_]\ndevices: 4",
    "experiment__wide": (
        "# @package _global_\ndefaults:\n- override /trainer: four\n- override /data: large\nseed: 1\n"
    ),
}


def test_a_file_further_in_chooses_for_the_whole_config(tmp_path: Path) -> None:
    files = {**TEMPLATE, "config": TEMPLATE["config"].replace("null", "wide")}
    found, notes = layers(tmp_path, **files)
    assert found == [
        ("config.yaml", ""),
        ("data/large.yaml", "data"),
        ("trainer/one.yaml", "trainer"),
        ("trainer/four.yaml", "trainer"),
        ("experiment/wide.yaml", ""),
    ]
    assert notes == []


def test_the_outer_choice_counts_and_the_command_lines_before_all(tmp_path: Path) -> None:
    files = {**TEMPLATE, "config": TEMPLATE["config"].replace("null", "wide") + "- override data: small\n"}
    found, _ = layers(tmp_path, **files)
    assert ("data/small.yaml", "data") in found and ("trainer/four.yaml", "trainer") in found
    config = write(tmp_path, **files)
    chosen = hydra_layers(config, root=tmp_path, notes=[], choices={"data": "large", "trainer": None})
    assert [layer.path.stem for layer in chosen] == ["config", "large", "wide"]


def test_two_entries_of_one_group_are_chosen_apart(tmp_path: Path) -> None:
    config = "defaults:\n- data@train: small\n- data@val: small\n- override data@val: large\n"
    found, _ = layers(tmp_path, config=config, data__small="a: 1", data__large="a: 2")
    assert found[:2] == [("data/small.yaml", "train"), ("data/large.yaml", "val")]


@pytest.mark.parametrize("key", ["experiment", "+experiment"])
def test_what_is_given_for_a_group_chooses_its_file(key: str, tmp_path: Path) -> None:
    listed = (
        TEMPLATE["config"] if key == "experiment" else TEMPLATE["config"].replace("- experiment: null\n", "")
    )
    conf = write(tmp_path, **{**TEMPLATE, "config": listed})
    (stage,) = read_config(conf, overrides={key: "wide", "data.batch_size": 5}).stages
    assert {name: found.value for name, found in stage.values.items() if "defaults" not in name} == {
        "data.batch_size": 5,
        "trainer.devices": 4,
        "seed": 1,
    }


def test_an_option_that_a_group_does_not_have(tmp_path: Path) -> None:
    conf = write(tmp_path, **TEMPLATE)
    with pytest.raises(
        BadInput, match=r"trainer=five: the group trainer has no five.yaml .*it has four, one"
    ):
        read_config(conf, overrides={"trainer": "five"})
