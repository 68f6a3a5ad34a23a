from __future__ import annotations

from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.planner.config.job_config import main_file, read_config
from tests.support.planner import CONFIG, HUGGING_FACE, write_curriculum


def test_a_single_file_is_one_stage(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    config = read_config(path)
    (stage,) = config.stages
    found = stage.find("data_loader.batch_size")
    assert found is not None and found.place is not None
    assert (found.value, found.place.path, found.place.key, found.place.line) == (
        4,
        path,
        "data_loader.batch_size",
        3,
    )
    assert str(found.place) == "c.yaml:3"
    assert found.where == "data_loader.batch_size (c.yaml:3)"
    rate = stage.find("training.learning_rate")
    assert rate is not None and (rate.value, rate.num_ignored) == (2e-4, 1)
    assert (config.root, config.hydra, config.notes) == (tmp_path, False, ())


def test_a_folder_with_a_curriculum_has_a_view_per_stage(tmp_path: Path) -> None:
    conf = write_curriculum(tmp_path)
    config = read_config(conf)
    assert [stage.name for stage in config.stages] == ["01_stage", "02_stage"]
    negatives = [stage.values["n_negatives"] for stage in config.stages]
    assert [found.value for found in negatives] == [24, 8]
    assert [found.place.path.name for found in negatives if found.place] == ["01_stage.yaml", "02_stage.yaml"]
    batches = {stage.values["data_loader.batch_size"].place for stage in config.stages}
    assert len(batches) == 1  # one value that all stages share
    assert len(config.documents) == 3


def test_stages_by_a_glob_or_not_at_all(tmp_path: Path) -> None:
    conf = write_curriculum(tmp_path)
    assert [stage.name for stage in read_config(conf, stages="curriculum/02*.yaml").stages] == ["02_stage"]
    assert [stage.name for stage in read_config(conf, stages="").stages] == ["training"]
    with pytest.raises(BadInput, match="no stage matches"):
        read_config(conf, stages="nothing/*.yaml")


def test_a_hydra_folder_is_merged_and_each_value_keeps_its_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "config.yaml").write_text(
        "defaults:\n  - data: text\nbs: 6\ndata:\n  workers: 2\n  tags: [z]\n"
    )
    (tmp_path / "data" / "text.yaml").write_text(
        "batch_size: ${bs}\nworkers: 1\ntags: [a, b]\nname: ${oc.env:NAME}\nloop: ${data.loop}\n"
    )
    config = read_config(tmp_path)
    (stage,) = config.stages
    assert config.hydra
    found = stage.find("data.batch_size")
    assert found is not None and found.place is not None
    assert (found.key, found.value, found.place.path.name, found.place.key) == ("bs", 6, "config.yaml", "bs")
    assert stage.values["data.workers"].value == 2
    assert [key for key in stage.values if key.startswith("data.tags")] == ["data.tags.0"]
    assert "defaults.0.data" not in stage.values
    for key in ("data.name", "data.loop"):  # what cannot be followed stays as it is
        unresolved = stage.find(key)
        assert unresolved is not None and str(unresolved.value).startswith("${")


def test_stages_of_a_hydra_group_take_the_place_of_the_picked_one(tmp_path: Path) -> None:
    (tmp_path / "curriculum").mkdir()
    (tmp_path / "config.yaml").write_text("defaults:\n  - _self_\n  - curriculum: 01\nbatch_size: 2\n")
    (tmp_path / "curriculum" / "01.yaml").write_text("n_negatives: 1\nonly_here: 1\n")
    (tmp_path / "curriculum" / "02.yaml").write_text("n_negatives: 2\n")
    one, two = read_config(tmp_path).stages
    assert one.values["curriculum.n_negatives"].value == 1
    assert two.values["curriculum.n_negatives"].value == 2
    assert "curriculum.only_here" not in two.values


def test_values_of_the_command_line_lie_over_all_and_have_no_place(tmp_path: Path) -> None:
    conf = write_curriculum(tmp_path)
    config = read_config(conf, overrides={"model.lora.r": 16, "+model.name": "x"})
    for stage in config.stages:
        found = stage.find("model.lora.r")
        assert found is not None and (found.value, found.place) == (16, None)
        assert found.where == "model.lora.r (--set)"
        assert stage.values["model.name"].value == "x"
    with pytest.raises(
        BadInput, match=r"--set model.lora.rr=1: config.yaml has no such key .*nearest: model.lora.r"
    ):
        read_config(conf, overrides={"model.lora.rr": 1})


def test_which_file_of_a_folder_is_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no config at"):
        main_file(tmp_path / "absent")
    with pytest.raises(BadInput, match=r"has no config.yaml .*it has no config"):
        main_file(tmp_path)
    (tmp_path / "args.json").write_text(HUGGING_FACE)
    assert main_file(tmp_path).name == "args.json"
    (tmp_path / "other.yaml").write_text("a: 1")
    with pytest.raises(BadInput, match=r"name one of its files: args.json, other.yaml"):
        main_file(tmp_path)
    (tmp_path / "config.yml").write_text("a: 1")
    assert main_file(tmp_path).name == "config.yml"
    assert main_file(tmp_path / "args.json").name == "args.json"


def test_a_stage_that_does_not_parse_is_named(tmp_path: Path) -> None:
    conf = write_curriculum(tmp_path)
    (conf / "curriculum" / "02_stage.yaml").write_text("a: [")
    with pytest.raises(BadInput, match=r"curriculum/02_stage.yaml is not valid YAML"):
        read_config(conf)


@pytest.mark.parametrize(
    "text",
    [
        "lr: 1\nstages:\n  - {name: warm, batch_size: 4}\n  - {name: main, batch_size: 8, lr: 2}\n",
        "- {name: warm, lr: 1, batch_size: 4}\n- {name: main, batch_size: 8, lr: 2}\n",
    ],
)
def test_a_list_of_stages_lies_over_the_rest(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    warm, main = read_config(path).stages
    assert (warm.name, main.name) == ("warm", "main")
    values = [{key: found.value for key, found in stage.values.items()} for stage in (warm, main)]
    assert values[0] == {"lr": 1, "name": "warm", "batch_size": 4}
    assert values[1] == {"lr": 2, "name": "main", "batch_size": 8}
    place = main.values["batch_size"].place
    assert place is not None and place.key.endswith("1.batch_size")


def test_a_list_of_numbers_is_no_list_of_stages(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("batch_size: 4\nstages: [1, 2]\n")
    (stage,) = read_config(path).stages
    assert stage.name == "training"
