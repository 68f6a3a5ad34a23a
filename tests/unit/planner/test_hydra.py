from __future__ import annotations

from pathlib import Path

import pytest

from flatout.errors import BadInput
from flatout.planner.documents import parse_document
from flatout.planner.hydra import hydra_layers, is_hydra, package_header


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
        "defaults of config.yaml: there is no model/registered.yaml, so its values are unknown",
        "defaults of config.yaml: task: ??? is chosen at launch",
    ]


def test_defaults_that_go_in_a_circle(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="go in a circle"):
        layers(tmp_path, config="defaults: [a]", a="defaults: [b]", b="defaults: [a]")
