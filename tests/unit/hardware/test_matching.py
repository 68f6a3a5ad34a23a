"""Driver names to rows: whole names only, and memory decides between boards of one name."""

from __future__ import annotations

import pytest

from flatout.hardware.matching import all_datasheets, find_datasheet, plain_name


@pytest.mark.parametrize(
    ("driver_name", "row"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X OAM", "MI300X"),
    ],
)
def test_names_of_drivers(driver_name: str, row: str) -> None:
    found = find_datasheet(driver_name)
    assert found is not None
    assert found.name == row


@pytest.mark.parametrize(
    "driver_name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "GRID A100-40C",
        "NVIDIA A100X",
        "",
    ],
)
def test_a_part_of_a_name_is_no_match(driver_name: str) -> None:
    assert find_datasheet(driver_name) is None


def test_memory_decides_between_boards_of_one_name() -> None:
    assert find_datasheet("NVIDIA GeForce RTX 3080") is None
    for mib, name in ((10240, "RTX 3080-10GB"), (12288, "RTX 3080-12GB")):
        found = find_datasheet("NVIDIA GeForce RTX 3080", memory_bytes=mib * 2**20)
        assert found is not None
        assert found.name == name


def test_memory_rejects_a_slice_of_a_gpu() -> None:
    assert find_datasheet("NVIDIA A40", memory_bytes=8 * 2**30) is None
    assert find_datasheet("NVIDIA GeForce RTX 4060 Ti", memory_bytes=8188 * 2**20) is None


def test_a_driver_of_another_age_reports_a_little_less() -> None:
    found = find_datasheet("Tesla T4", memory_bytes=15109 * 2**20)
    assert found is not None
    assert found.name == "T4"


@pytest.mark.parametrize("row", all_datasheets(), ids=lambda row: row.name)
def test_every_row_is_found_by_its_driver_names(row: object) -> None:
    from flatout.hardware.datasheet import Datasheet

    assert isinstance(row, Datasheet)
    for name in row.driver_names:
        assert find_datasheet(name, memory_bytes=row.memory_bytes) == row


def test_plain_names() -> None:
    assert plain_name("NVIDIA A100-SXM4-80GB") == plain_name("a100 sxm4_80gb") == "a100sxm480gb"
    assert plain_name("NVIDIA") == ""
