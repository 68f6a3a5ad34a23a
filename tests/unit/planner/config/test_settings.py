from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import PRECISIONS as JOB_PRECISIONS
from flatout.memory.jobs.job import Recipe
from flatout.planner.config.job_config import read_config
from flatout.planner.config.knobs import Mapped, recognise_style
from flatout.planner.config.settings import (
    PRECISIONS,
    SHOWN_SIZES,
    OpenedConfig,
    Settings,
    StageSettings,
    find_ranks,
    open_config,
    sharding_note,
)
from tests.support import planner as plans
from tests.support.planner import write_curriculum


def settings_of(
    path: Path,
    *,
    mapped: Mapped | None = None,
    size_names: tuple[str, ...] = (),
    ranks: int | None = None,
    **values: Any,
) -> Settings:
    config = read_config(path, overrides={name.replace("__", "."): value for name, value in values.items()})
    opened = OpenedConfig(config=config, style=recognise_style(config), mapped=mapped or Mapped())
    return opened.with_sizes(opened.settings(ranks=ranks), size_names)


def stage_of(folder: Path, text: str, **options: Any) -> StageSettings:
    path = folder / "c.yaml"
    path.write_text(text)
    return settings_of(path, **options).stages[0]


def test_a_curriculum(tmp_path: Path) -> None:
    settings = settings_of(
        plans.write_curriculum(tmp_path), size_names=("batch_size", "n_negatives", "length")
    )
    one, two = settings.stages
    assert one.recipe == two.recipe == Recipe(precision="fp16", accumulation=16)
    assert (one.batch_size.value, one.eval_batch_size, one.eval_batch) == (4, None, 4)
    assert one.batch_size == two.batch_size
    assert [stage.sizes["n_negatives"].value for stage in settings.stages] == [24, 8]
    assert "length" not in one.sizes and "batch_size" not in one.sizes
    assert one.learning_rate is not None and one.learning_rate.value == 2e-4
    assert settings.notes == (
        "training.learning_rate (config.yaml:12) is given 2 times; the last one counts",
    )
    assert (settings.ranks.value, settings.ranks.source) == (1, "assumed")


def test_training_arguments_and_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(plans.HUGGING_FACE)
    (stage,) = settings_of(path).stages
    assert stage.recipe == Recipe(precision="bf16", accumulation=8, clip_norm=1.0)
    assert (stage.batch_size.value, stage.eval_batch) == (4, 16)
    assert stage.optimizer is not None and stage.optimizer.value == "adamw_torch"
    assert stage.clip_norm.source == "assumed: the default of Hugging Face TrainingArguments"
    path.write_text('{"gradient_accumulation_steps": 2}')
    (stage,) = settings_of(path).stages
    assert (stage.batch_size.value, stage.batch_size.place, stage.eval_batch) == (8, None, 8)


def test_lightning(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(plans.LIGHTNING)
    settings = settings_of(path)
    (stage,) = settings.stages
    assert stage.recipe == Recipe(precision="bf16", accumulation=2, clip_norm=1.0)
    assert (settings.ranks.value, settings.ranks.reason) == (4, "from trainer.devices (c.yaml:5)")
    assert settings_of(path, ranks=2).ranks.value == 2
    assert settings_of(path, mapped=Mapped(ranks=3)).ranks.value == 3


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("32", "fp32"),
        ("32-true", "fp32"),
        ("16-mixed", "fp16"),
        ("bf16", "bf16"),
        ("'bf16-true'", "pure-bf16"),
        ("no", "fp32"),
    ],
)
def test_precision_as_people_write_it(word: str, expected: str, tmp_path: Path) -> None:
    assert stage_of(tmp_path, f"batch_size: 1\nprecision: {word}\n").precision.value == expected


def test_every_precision_of_a_recipe_can_be_written() -> None:
    assert set(PRECISIONS.values()) == set(JOB_PRECISIONS)


def test_a_precision_that_no_plan_is_made_for(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"precision at precision \(c.yaml:2\) is '64-true', which is not supported"
    ):
        stage_of(tmp_path, "batch_size: 1\nprecision: 64-true\n")


@pytest.mark.parametrize(
    ("written", "planned"),
    [
        ("amp: true", "fp16"),
        ("use_amp: true", "fp16"),
        ("amp: false", "fp32"),
        ("amp: true\nbf16: true", "bf16"),
    ],
)
def test_a_switch_for_autocast_is_half_precision(tmp_path: Path, written: str, planned: str) -> None:
    assert stage_of(tmp_path, f"batch_size: 1\n{written}\n").recipe.precision == planned


def test_switches_and_clipping(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, "batch_size: 1\nfp16: 'true'\ngradient_checkpointing: yes\nmax_grad_norm: 0\n")
    assert stage.recipe == Recipe(precision="fp16", checkpointing=True)
    with pytest.raises(BadInput, match=r"gradient_checkpointing .* is 'maybe', neither true nor false"):
        stage_of(tmp_path, "batch_size: 1\ngradient_checkpointing: maybe\n")


@pytest.mark.parametrize("value", ["auto", "0", "-1", "1.5", "true", "${oc.env:B}"])
def test_a_batch_size_that_is_no_number(value: str, tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"batch_size at batch_size \(c.yaml:1\) is .*, not a whole number of at least 1"
    ):
        stage_of(tmp_path, f"batch_size: {value}\n")


@pytest.mark.parametrize("target", ["bs", ".bs"])
def test_a_value_that_leads_nowhere_is_named_with_a_way_on(target: str, tmp_path: Path) -> None:
    text = f"data:\n  batch_size: ${{{target}}}\n"
    with pytest.raises(BadInput, match=r"data.batch_size \(c.yaml:2\) is '\$.*--set data.batch_size=VALUE"):
        stage_of(tmp_path, text)
    assert stage_of(tmp_path, text, data__batch_size=4).batch_size.value == 4
    with pytest.raises(BadInput, match=r"accumulation at accumulation \(c.yaml:2\) is '\$"):
        stage_of(tmp_path, f"batch_size: 4\naccumulation: ${{{target}}}\n")


def test_a_knob_that_nothing_uses_is_said(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("batch_size: 4\nsteps: 16\n")
    mapped = Mapped(keys={"acumulation": "steps"})
    (note,) = settings_of(path, mapped=mapped, size_names=("batch_size", "texts")).notes
    assert note.startswith("the knob acumulation (steps) is not used; knobs are accumulation, batch_size,")
    assert settings_of(path, mapped=Mapped(keys={"texts": "steps"}), size_names=("texts",)).notes == ()


def test_a_number_in_quotes_is_a_number(tmp_path: Path) -> None:
    assert stage_of(tmp_path, "batch_size: '4'\n").batch_size.value == 4


def test_without_a_batch_size_there_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"c.yaml has no batch_size"):
        stage_of(tmp_path, "lr: 1\n")


def test_sizes_by_the_mapping_and_sizes_that_could_be_two(tmp_path: Path) -> None:
    text = "batch_size: 1\na: {max_length: 5}\nb: {max_length: 6}\nk: 7\n"
    path = tmp_path / "c.yaml"
    path.write_text(text)
    settings = settings_of(path, size_names=("length", "negatives"), mapped=Mapped(keys={"negatives": "k"}))
    assert {name: found.value for name, found in settings.stages[0].sizes.items()} == {"negatives": 7}
    (note,) = settings.notes
    assert note == (
        "length could be a.max_length or b.max_length; "
        "the job's own length is used (say which: --knob length=a.max_length)"
    )
    named = settings_of(path, mapped=Mapped(keys={"length": "b.max_length"}))
    assert named.stages[0].sizes["length"].value == 6


def test_knobs_that_are_only_shown_may_be_two(tmp_path: Path) -> None:
    assert stage_of(tmp_path, "batch_size: 1\ng: {lr: 1}\nd: {lr: 2}\n").learning_rate is None
    assert stage_of(tmp_path, "batch_size: 1\nlr: fast\n").learning_rate is None


def test_a_value_of_the_command_line_has_no_place(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, "batch_size: 1\n", batch_size=9)
    assert (stage.batch_size.value, stage.batch_size.place) == (9, None)


def test_two_precisions_at_once_are_planned_as_one_and_said(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("batch_size: 1\nfp16: true\nbf16: true\n")
    settings = settings_of(tmp_path / "c.yaml")
    assert settings.stages[0].precision.value == "bf16"
    assert settings.notes == ("bf16 (c.yaml:3) and fp16 (c.yaml:2) are both on; planned as bf16",)


def ranks(
    folder: Path, devices: str, *, mapped: int | None = None, given: int | None = None
) -> Decision[int]:
    (folder / "cli.yaml").write_text(plans.LIGHTNING.replace("  devices: 4\n", devices))
    (stage,) = open_config(folder / "cli.yaml").config.stages
    return find_ranks(stage, Mapped(ranks=mapped), given=given)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("  devices: 4\n", 4),
        ("  devices: '4'\n", 4),
        ("  devices: [0, 2, 3]\n", 3),
        ("  devices:\n  - 1\n  - 3\n", 2),
        ("  devices: '0,1'\n", 2),
        ("  devices: '3,'\n", 1),
        ("  devices: 4\n  num_nodes: 2\n", 8),
        ("  devices: [0, 1]\n  num_nodes: 2\n", 4),
        ("  num_nodes: 2\n", 1),
    ],
)
def test_devices_and_nodes_as_lightning_reads_them(tmp_path: Path, devices: str, expected: int) -> None:
    assert ranks(tmp_path, devices).value == expected


@pytest.mark.parametrize("devices", ["auto", "-1", "'-1'"])
def test_as_many_as_there_are_is_no_number_and_said(tmp_path: Path, devices: str) -> None:
    found = ranks(tmp_path, f"  devices: {devices}\n")
    assert (found.value, found.source) == (1, "assumed")
    assert found.reason.startswith("trainer.devices (cli.yaml:5) is ")
    assert found.reason.endswith("which names no number: give it with --ranks")


def test_the_command_line_goes_before_the_mapping_file_and_that_before_the_config(tmp_path: Path) -> None:
    assert ranks(tmp_path, "  devices: 4\n", mapped=2).value == 2
    assert ranks(tmp_path, "  devices: 4\n", mapped=2, given=3).value == 3


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("fsdp: full_shard auto_wrap", "fsdp (c.yaml:2)"),
        ("deepspeed: ds.json", "deepspeed (c.yaml:2)"),
        ("trainer: {strategy: fsdp}", "trainer.strategy (c.yaml:2)"),
        ("trainer: {strategy: deepspeed_stage_2}", "trainer.strategy (c.yaml:2)"),
        (
            "trainer: {strategy: {class_path: lightning.pytorch.strategies.FSDPStrategy}}",
            "trainer.strategy.class_path (c.yaml:2)",
        ),
    ],
)
def test_a_model_that_is_sharded_is_planned_whole_and_that_is_said(
    tmp_path: Path, line: str, where: str
) -> None:
    (tmp_path / "c.yaml").write_text(f"batch_size: 4\n{line}\n")
    opened = open_config(tmp_path / "c.yaml")
    note = sharding_note(opened.config.stages[0])
    assert note is not None and note.startswith(f"{where} shards the model")
    assert note in opened.settings().notes


@pytest.mark.parametrize("line", ["fsdp: ''", "deepspeed: null", "trainer: {strategy: ddp}", "fsdp: false"])
def test_a_model_that_is_not_is_no_note(tmp_path: Path, line: str) -> None:
    (tmp_path / "c.yaml").write_text(f"batch_size: 4\n{line}\n")
    assert sharding_note(open_config(tmp_path / "c.yaml").config.stages[0]) is None


def test_a_config_alone(tmp_path: Path) -> None:
    opened = open_config(write_curriculum(tmp_path))
    settings = opened.settings()
    assert opened.style.value.name == settings.style.value == "plain config"
    assert opened.mapped.model is None
    assert settings.stages[0].sizes == {}
    assert set(opened.with_sizes(settings).stages[0].sizes) == {"n_positives", "n_negatives"}
    assert set(SHOWN_SIZES) == {"length", "n_positives", "n_negatives"}
    assert set(opened.with_sizes(settings, ("n_negatives",)).stages[0].sizes) == {"n_negatives"}


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
    with pytest.raises(BadInput, match="--ranks 0 is not a number of processes"):
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


def test_a_global_batch_is_made_up_by_accumulation(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("micro_batch_size: 4\nglobal_batch_size: 64\n")
    for ranks, accumulation in ((None, 16), (2, 8)):
        (stage,) = open_config(path).settings(ranks=ranks).stages
        assert (stage.batch_size.value, stage.accumulation.value) == (4, accumulation)
        assert stage.global_batch_size is not None
    with pytest.raises(BadInput, match=r"is 64, not a multiple of the 12 samples that 3 ranks take at once"):
        open_config(path).settings(ranks=3)
    path.write_text("micro_batch_size: 4\nglobal_batch_size: 64\naccumulation: 2\n")
    found = open_config(path).settings()
    assert found.stages[0].accumulation.value == 2
    assert "is 64, but batch × accumulation × ranks is 8, which is planned" in found.notes[0]
