from __future__ import annotations

from pathlib import Path

import pytest

from flatout.decisions import Decision
from flatout.planner.config.knobs import Mapped
from flatout.planner.config.opened import open_config
from flatout.planner.config.ranks import find_ranks, sharding_note
from tests.support import planner as plans


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
