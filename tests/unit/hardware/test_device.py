"""Real and simulated devices are one type with the same facts."""

from __future__ import annotations

from flatout.ground.codec import decode, encode
from flatout.hardware.device import Device, device_of_datasheet, device_of_driver, half_format
from flatout.hardware.matching import all_datasheets, find_datasheet


def test_a_real_and_a_simulated_gpu_have_the_same_facts() -> None:
    row = find_datasheet("NVIDIA H200")
    assert row is not None
    simulated = device_of_datasheet(row)
    real = device_of_driver("NVIDIA H200", memory_bytes=row.memory_bytes, compute_capability="9.0", index=0)
    assert simulated.simulated
    assert not real.simulated
    for name in (
        "memory_bytes",
        "compute_capability",
        "bf16",
        "peak_flops",
        "bandwidth_bytes_per_s",
        "source",
    ):
        assert getattr(real, name) == getattr(simulated, name)
    assert real.missing == {}


def test_the_drivers_own_facts_come_first() -> None:
    device = device_of_driver("Tesla T4", memory_bytes=15109 * 2**20, compute_capability="7.5")
    assert device.memory_bytes == 15109 * 2**20
    assert device.datasheet == "T4"
    assert device.bf16 is False


def test_a_gpu_without_a_datasheet_keeps_what_the_driver_says() -> None:
    device = device_of_driver("NVIDIA Wonder 1", memory_bytes=2**30, compute_capability="11.0")
    assert (device.bf16, device.peak_flops, device.bandwidth_bytes_per_s) == (True, {}, None)
    assert device.missing == dict.fromkeys(
        ("peak_flops", "bandwidth_bytes_per_s"), "no datasheet for 'NVIDIA Wonder 1'"
    )


def test_nothing_known_is_none_with_reasons() -> None:
    device = device_of_driver("?", memory_bytes=None)
    assert (device.memory_bytes, device.compute_capability, device.bf16) == (None, None, None)
    assert set(device.missing) == {
        "memory_bytes",
        "compute_capability",
        "bf16",
        "peak_flops",
        "bandwidth_bytes_per_s",
    }


def test_every_datasheet_gives_a_device_that_survives_json() -> None:
    rows = all_datasheets()
    assert rows
    for row in rows:
        device = device_of_datasheet(row)
        assert decode(Device, encode(device)) == device
        assert (device.compute_capability is None) == ("compute_capability" in device.missing)


def test_the_format_of_16_bits_is_the_one_that_is_multiplied_in_hardware() -> None:
    formats = {"9.0": "bfloat16", "8.0": "bfloat16", "7.5": "float16", "6.1": None, "?": None, None: None}
    assert {name: half_format(name) for name in formats} == formats
