from __future__ import annotations

from pathlib import Path

import pytest

from flatout.errors import BadInput
from flatout.planner.config.opened import SHOWN_SIZES, open_config
from tests.support.planner import write_curriculum


def test_a_config_alone(tmp_path: Path) -> None:
    opened = open_config(write_curriculum(tmp_path))
    settings = opened.settings()
    assert opened.style.value.name == settings.style.value == "plain config"
    assert opened.mapped.model is None
    assert set(settings.stages[0].sizes) == {"n_positives", "n_negatives"}
    assert set(SHOWN_SIZES) == {"length", "n_positives", "n_negatives"}
    assert set(opened.settings(size_names=("n_negatives",)).stages[0].sizes) == {"n_negatives"}


def test_a_mapping_file_beside_it_and_flags_over_that(tmp_path: Path) -> None:
    conf = write_curriculum(tmp_path)
    (conf / "flatout-plan.toml").write_text(
        'model = "pkg:build"\nstages = "curriculum/01*.yaml"\n'
        '[knobs]\nbatch_size = "data_loader.num_workers"\n'
    )
    opened = open_config(conf)
    assert opened.mapped.model == "pkg:build"
    (stage,) = opened.settings().stages
    assert (stage.name, stage.batch_size.source) == ("01_stage", "data_loader.num_workers (config.yaml:4)")
    flagged = open_config(
        conf, knobs=["batch_size=data_loader.batch_size"], overrides=["training.trainer.precision=bf16-mixed"]
    )
    (stage,) = flagged.settings().stages
    assert stage.batch_size.source == "data_loader.batch_size (config.yaml:3)"
    assert stage.precision.value == "bf16"
    assert flagged.overrides == {"training.trainer.precision": "bf16-mixed"}


def test_a_mapping_file_by_name(tmp_path: Path) -> None:
    conf = write_curriculum(tmp_path)
    (tmp_path / "other.toml").write_text("ranks = 4\n")
    opened = open_config(conf, mapping_file=tmp_path / "other.toml")
    assert opened.settings().ranks.value == 4
    assert opened.settings(ranks=2).ranks.value == 2
    with pytest.raises(BadInput, match="--ranks 0 is no number of processes"):
        opened.settings(ranks=0)
    with pytest.raises(BadInput, match="no mapping file at"):
        open_config(conf, mapping_file=tmp_path / "absent.toml")


def test_every_stage_has_its_own_values(tmp_path: Path) -> None:
    values = open_config(write_curriculum(tmp_path)).values()
    assert [(name, found["n_negatives"]) for name, found in values.items()] == [
        ("01_stage", 24),
        ("02_stage", 8),
    ]
    assert all(found["data_loader.batch_size"] == 4 for found in values.values())


def test_the_keys_of_knobs_are_found_and_two_candidates_are_none(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("batch_size: 4\na: {lr: 1}\nb: {lr: 2}\nmax_length: 8\n")
    opened = open_config(tmp_path / "c.yaml")
    assert opened.keys_of(["batch_size", "learning_rate", "length", "absent"]) == {"batch_size", "max_length"}
