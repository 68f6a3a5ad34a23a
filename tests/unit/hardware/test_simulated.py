"""Devices by name and by memory, and what is said to a name that fits none or several."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput, UnknownDevice
from flatout.hardware.matching import all_datasheets
from flatout.hardware.simulated import simulated_device


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("A100-80GB", "A100-SXM4-80GB"),
        ("a100 80gb", "A100-SXM4-80GB"),
        ("a100_80GB_pcie", "A100-PCIe-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("H100", "H100-SXM"),
        ("h100 nvl", "H100-NVL"),
        ("t4", "T4"),
        ("RTX4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("2080ti", "RTX 2080 Ti"),
        ("A6000", "RTX A6000"),
        ("RTX 3080", "RTX 3080-10GB"),
        ("mi300x", "MI300X"),
    ],
)
def test_names_are_read_with_tolerance(name: str, device: str) -> None:
    found = simulated_device(name)
    assert found.name == device
    assert found.simulated
    assert found.memory_bytes is not None
    assert found.peak_flops


@pytest.mark.parametrize(
    ("name", "memory_bytes"),
    [
        ("24GB", 23028 * 2**20),  # an A10, an A10G
        ("24 GB", 23028 * 2**20),
        ("23GB", 23 * 10**9),  # nobody sells it
        ("24gib", 24 * 2**30),
        ("1.5 TiB", 3 * 2**39),
        ("512MB", 512 * 10**6),
    ],
)
def test_an_amount_of_memory_is_a_device_of_nothing_else(name: str, memory_bytes: int) -> None:
    device = simulated_device(name)
    assert device.memory_bytes == memory_bytes
    assert (device.peak_flops, device.bandwidth_bytes_per_s, device.bf16) == ({}, None, None)
    assert set(device.missing) == {"compute_capability", "bf16", "peak_flops", "bandwidth_bytes_per_s"}


@given(st.integers(min_value=1, max_value=10**6), st.sampled_from(["MB", "GB", "MiB", "GiB"]))
def test_binary_units_are_no_smaller_than_decimal_ones(amount: int, unit: str) -> None:
    decimal = simulated_device(f"{amount}{unit.replace('i', '')}").memory_bytes
    binary = simulated_device(f"{amount}{unit[0]}iB").memory_bytes
    assert decimal is not None and binary is not None
    assert 1 <= binary / decimal < 1.1


def test_every_row_is_found_by_its_own_name_and_aliases() -> None:
    rows = all_datasheets()
    assert rows
    for row in rows:
        for name in (row.name, *row.aliases):
            assert simulated_device(name).name == row.name


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("A100", "A100-SXM4-80GB"),
        ("V100", "V100-SXM2-32GB"),
        ("A1000-80GB", "A100-SXM4-80GB"),
        ("RTX 4909", "RTX 4090"),
        ("H201", "H200"),
    ],
)
def test_an_unknown_name_is_answered_with_close_ones(name: str, suggestion: str) -> None:
    with pytest.raises(UnknownDevice) as raised:
        simulated_device(name)
    assert isinstance(raised.value, BadInput)
    assert raised.value.exit_code == 2
    assert repr(name) in raised.value.message
    assert suggestion in (raised.value.hint or "")


@pytest.mark.parametrize("name", ["", "   ", "toaster", "0GB", "GB", "24", "-24GB", "nvidia"])
def test_nonsense_is_answered_with_what_can_be_asked(name: str) -> None:
    with pytest.raises(UnknownDevice) as raised:
        simulated_device(name)
    assert raised.value.hint


@given(st.text(max_size=15))
def test_any_text_is_a_device_or_a_clear_error(name: str) -> None:
    try:
        device = simulated_device(name)
    except UnknownDevice as error:
        hint = error.hint
    else:
        hint = None
    assert hint or device.memory_bytes
