"""The table against arithmetic: what the figures of one chip must have to do with each other.

A mistyped or sparse figure breaks a ratio that the architecture fixes, or the product of cores and clock.
"""

from __future__ import annotations

import pytest

from flatout.hardware.datasheet import Datasheet
from flatout.hardware.datasheet_rows import ROWS
from flatout.testing.datasheets import DatasheetContract

CAPABILITIES = {
    "Pascal": {"6.0", "6.1"},
    "Volta": {"7.0"},
    "Turing": {"7.5"},
    "Ampere": {"8.0", "8.6"},
    "Ada": {"8.9"},
    "Hopper": {"9.0"},
    "Blackwell": {"10.0", "12.0"},
}

# CUDA cores and boost clock (MHz); each core does one multiply-add a clock.
CORES_AND_CLOCKS = {
    "P100-PCIe-16GB": (3584, 1303),
    "P100-SXM2-16GB": (3584, 1480),
    "P40": (3840, 1531),
    "GTX 1080 Ti": (3584, 1582),
    "T4": (2560, 1590),
    "V100-PCIe-16GB": (5120, 1380),
    "V100-PCIe-32GB": (5120, 1380),
    "V100-SXM2-16GB": (5120, 1530),
    "V100-SXM2-32GB": (5120, 1530),
    "V100S-PCIe-32GB": (5120, 1597),
    "RTX 2080 Ti": (4352, 1545),
    "TITAN RTX": (4608, 1770),
    "Quadro RTX 6000": (4608, 1770),
    "Quadro RTX 8000": (4608, 1770),
    "A100-PCIe-40GB": (6912, 1410),
    "A100-SXM4-40GB": (6912, 1410),
    "A100-PCIe-80GB": (6912, 1410),
    "A100-SXM4-80GB": (6912, 1410),
    "A30": (3584, 1440),
    "A2": (1280, 1770),
    "A10": (9216, 1695),
    "A10G": (10240, 1710),
    "A40": (10752, 1740),
    "RTX A4000": (6144, 1560),
    "RTX A5000": (8192, 1695),
    "RTX A6000": (10752, 1800),
    "RTX 3060-12GB": (3584, 1777),
    "RTX 3070": (5888, 1725),
    "RTX 3080-10GB": (8704, 1710),
    "RTX 3080-12GB": (8960, 1710),
    "RTX 3090": (10496, 1695),
    "RTX 3090 Ti": (10752, 1860),
    "L4": (7424, 2040),
    "L40": (18176, 2490),
    "L40S": (18176, 2520),
    "RTX 4060 Ti-16GB": (4352, 2535),
    "RTX 4070": (5888, 2475),
    "RTX 4070 Ti": (7680, 2610),
    "RTX 4080": (9728, 2505),
    "RTX 4080 SUPER": (10240, 2550),
    "RTX 4090": (16384, 2520),
    "RTX 5000 Ada": (12800, 2550),
    "RTX 6000 Ada": (18176, 2505),
    "H100-PCIe": (14592, 1755),
    "H100-SXM": (16896, 1980),
    "H100-NVL": (16896, 1785),
    "H200": (16896, 1980),
    "H200-NVL": (16896, 1785),
    "GH200-96GB": (16896, 1980),
    "GH200-144GB": (16896, 1980),
    "RTX 5070 Ti": (8960, 2452),
    "RTX 5080": (10752, 2617),
    "RTX 5090": (21760, 2407),
    "RTX PRO 6000 Blackwell": (24064, 2617),
    "RTX PRO 6000 Blackwell Max-Q": (24064, 2280),
}

# Bus width in bits and transfers a second, of memory whose clock is public.
BUSES = {
    "T4": (256, 10e9),
    "RTX 2080 Ti": (352, 14e9),
    "A10": (384, 12.5e9),
    "A40": (384, 14.5e9),
    "RTX 3090": (384, 19.5e9),
    "L4": (192, 12.5e9),
    "L40S": (384, 18e9),
    "RTX 4090": (384, 21e9),
    "RTX 6000 Ada": (384, 20e9),
    "RTX 5090": (512, 28e9),
}

BY_NAME = {row.name: row for row in ROWS}
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def test_the_table_is_as_long_as_promised() -> None:
    assert len(ROWS) >= 30
    named = {name.split("-")[0] for name in BY_NAME}
    wanted = {"T4", "V100", "RTX 2080 Ti", "Quadro RTX 6000", "A10", "A30", "A40", "A100", "RTX A6000"}
    wanted |= {"RTX 3090", "L4", "L40", "L40S", "RTX 4090", "RTX 6000 Ada", "H100", "H200", "GH200", "B200"}
    wanted |= {"RTX 5090", "RTX 5080", "RTX PRO 6000 Blackwell", "P100", "MI250X", "MI300X", "MI325X"}
    assert wanted <= named


class TestRows(DatasheetContract):
    def make_rows(self) -> tuple[Datasheet, ...]:
        return ROWS


@each_row
def test_the_architecture_fixes_the_capability(row: Datasheet) -> None:
    if row.vendor == "NVIDIA":
        assert row.compute_capability in CAPABILITIES[row.architecture]
    else:
        assert "gfx" in row.architecture


@each_row
def test_integers_are_as_fast_as_the_generation_makes_them(row: Datasheet) -> None:
    peaks = row.peak_flops
    if row.bf16 and "int8" in peaks:
        expected = 4 if row.half_rate_accumulate else 1 if "gfx90a" in row.architecture else 2
        assert peaks["int8"] / peaks["fp16"] == pytest.approx(expected, rel=0.03)


@each_row
def test_hardware_has_the_dtypes_of_its_generation(row: Datasheet) -> None:
    if row.vendor == "NVIDIA" and row.compute_capability is not None:
        capability = float(row.compute_capability)
        assert row.bf16 == ("tf32" in row.peak_flops) == (capability >= 8.0)
        assert ("fp8" in row.peak_flops) == (capability >= 8.9)


def test_geforce_cards_since_turing_accumulate_at_half_rate() -> None:
    for row in ROWS:
        geforce = any("GeForce RTX" in name for name in row.driver_names)
        assert row.half_rate_accumulate == geforce, row.name


@pytest.mark.parametrize(("name", "cores_and_clock"), CORES_AND_CLOCKS.items())
def test_fp32_is_cores_times_clock(name: str, cores_and_clock: tuple[int, int]) -> None:
    cores, clock_mhz = cores_and_clock
    assert BY_NAME[name].peak_flops["fp32"] == pytest.approx(2 * cores * clock_mhz * 1e6, rel=0.01)


@pytest.mark.parametrize(("name", "bus"), BUSES.items())
def test_bandwidth_is_bus_width_times_rate(name: str, bus: tuple[int, float]) -> None:
    bits, transfers_per_s = bus
    assert BY_NAME[name].bandwidth_bytes_per_s == pytest.approx(bits / 8 * transfers_per_s, rel=0.01)


@pytest.mark.parametrize("name", CORES_AND_CLOCKS)
def test_cores_come_in_whole_multiprocessors(name: str) -> None:
    cores = 64 if BY_NAME[name].compute_capability in ("6.0", "7.0", "7.5", "8.0") else 128
    assert BY_NAME[name].multiprocessors == CORES_AND_CLOCKS[name][0] / cores


def test_multiprocessors_are_known_of_the_rows_whose_cores_are() -> None:
    assert {row.name for row in ROWS if row.multiprocessors} == set(CORES_AND_CLOCKS)
    without = {row.name for row in ROWS if row.vendor == "NVIDIA"} - set(CORES_AND_CLOCKS)
    assert without == {"B200", "GB200", "RTX PRO 6000 Blackwell Server"}
