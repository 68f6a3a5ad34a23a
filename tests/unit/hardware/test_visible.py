"""CUDA_VISIBLE_DEVICES, entry by entry, against what torch reads from the same value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.hardware.visible import GpuIdentity, MigIdentity, VisibleDevice, select_visible

GPUS = (
    GpuIdentity(uuid="GPU-aa11"),
    GpuIdentity(uuid="GPU-aa22"),
    GpuIdentity(
        uuid="GPU-bb33",
        instances=(
            MigIdentity(uuid="MIG-c1", gpu_instance=1, compute_instance=0),
            MigIdentity(uuid="MIG-c2", gpu_instance=2, compute_instance=0),
        ),
    ),
)


def numbers(value: str | None) -> list[int]:
    return [device.gpu for device in select_visible(value, gpus=GPUS).devices]


def test_not_set_shows_all() -> None:
    assert numbers(None) == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0", [0]),
        ("2,0,1", [2, 0, 1]),
        (" 1 , 2 ", [1, 2]),
        ("0,-1,2", [0]),
        ("-1", []),
        ("0,7,1", [0]),
        ("", []),
        ("  ", []),
        ("0,", [0]),
        ("1gpu,2ampere", [1, 2]),
        ("NoDevFiles", []),
        ("+1", [1]),
        ("0,GPU-aa22", [0]),
        ("0,1,0", []),
        ("00,0", []),
        ("0,7,7", []),
    ],
)
def test_numbers(value: str, shown: list[int]) -> None:
    assert numbers(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("GPU-aa11", [0]),
        ("GPU-b,GPU-aa2", [2, 1]),
        ("GPU-aa", []),
        ("GPU-zz,GPU-aa11", []),
        ("GPU-aa11,0", [0]),
        ("GPU-aa11,GPU-aa1", []),
    ],
)
def test_ids_and_their_prefixes(value: str, shown: list[int]) -> None:
    assert numbers(value) == shown


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("MIG-c2", [VisibleDevice(gpu=2, instance=1)]),
        ("MIG-c1,MIG-c2", [VisibleDevice(gpu=2, instance=0), VisibleDevice(gpu=2, instance=1)]),
        ("MIG-GPU-bb33/2/0", [VisibleDevice(gpu=2, instance=1)]),
        ("MIG-GPU-bb33/9/0", []),
        ("MIG-c", []),
        ("MIG-c1,GPU-aa11", [VisibleDevice(gpu=2, instance=0)]),
    ],
)
def test_mig_ids(value: str, devices: list[VisibleDevice]) -> None:
    assert list(select_visible(value, gpus=GPUS).devices) == devices


def test_a_list_that_is_cut_says_where() -> None:
    assert (
        select_visible("0,-1,2", gpus=GPUS).note == "CUDA_VISIBLE_DEVICES=0,-1,2 ends at '-1': no such device"
    )
    assert "twice" in (select_visible("1,1", gpus=GPUS).note or "")
    assert "empty" in (select_visible("", gpus=GPUS).note or "")
    assert select_visible("2,1", gpus=GPUS).note is None


@given(
    st.lists(
        st.one_of(
            st.integers(min_value=-2, max_value=5).map(str),
            st.sampled_from(["", " ", "1x", "x1", "0 ", "03"]),
        ),
        min_size=1,
        max_size=5,
    ).map(",".join)
)
def test_numbers_are_read_as_torch_reads_them(value: str) -> None:
    from torch.cuda import _parse_visible_devices

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", value)
        parsed = _parse_visible_devices()
    # torch ends the list at the first number past the last GPU only when it counts the devices.
    shown: list[object] = []
    for number in parsed:
        if isinstance(number, int) and number >= len(GPUS):
            break
        shown.append(number)
    assert numbers(value) == shown


@given(st.text(max_size=20))
def test_any_text_gives_places_that_exist_and_differ(value: str) -> None:
    devices = select_visible(value, gpus=GPUS).devices
    assert len(set(devices)) == len(devices)
    assert all(0 <= device.gpu < len(GPUS) for device in devices)
