"""The real NVML against what torch says of the same GPUs."""

from __future__ import annotations

import dataclasses
import os

import pytest

from flatout.ground.codec import decode, encode
from flatout.hardware.matching import find_datasheet
from flatout.hardware.nvml import GpuReader, read_gpus
from flatout.hardware.snapshot import GpuSnapshot, Snapshot
from tests.support.gpu import BLOCK_BYTES, rise_of_memory

pytestmark = pytest.mark.gpu


@pytest.fixture
def snapshot() -> Snapshot:
    return read_gpus()


def test_every_field_is_known_or_has_a_reason(snapshot: Snapshot) -> None:
    assert snapshot.gpus
    assert snapshot.driver_version is not None
    assert snapshot.cuda_version is not None
    for gpu in snapshot.gpus:
        for field in dataclasses.fields(GpuSnapshot):
            if getattr(gpu, field.name) is None and field.name != "mig_index":
                assert gpu.missing.get(field.name), field.name


def test_gpus_are_those_that_torch_sees(snapshot: Snapshot) -> None:
    import torch

    if any(gpu.mig_enabled for gpu in snapshot.gpus):
        pytest.skip("torch numbers MIG instances, not the GPUs that hold them")
    by_cuda_index = {gpu.cuda_index: gpu for gpu in snapshot.gpus if gpu.cuda_index is not None}
    assert sorted(by_cuda_index) == list(range(torch.cuda.device_count()))
    for index, gpu in by_cuda_index.items():
        properties = torch.cuda.get_device_properties(index)
        assert gpu.name == properties.name
        assert gpu.uuid == f"GPU-{properties.uuid}"
        assert gpu.compute_capability == f"{properties.major}.{properties.minor}"
        assert gpu.memory_total_bytes is not None
        # torch sees the total less what the driver keeps for itself.
        assert 0.95 * gpu.memory_total_bytes <= properties.total_memory <= gpu.memory_total_bytes


def test_memory_sees_an_allocation() -> None:
    with GpuReader() as reader:

        def used_bytes() -> int | None:
            return next(gpu for gpu in reader.snapshot().gpus if gpu.cuda_index == 0).memory_used_bytes

        assert rise_of_memory(used_bytes) >= 0.9 * BLOCK_BYTES


def test_memory_adds_up(snapshot: Snapshot) -> None:
    for gpu in snapshot.gpus:
        parts = (gpu.memory_used_bytes, gpu.memory_free_bytes, gpu.memory_reserved_bytes)
        if all(part is not None for part in parts):
            assert sum(part for part in parts if part is not None) == gpu.memory_total_bytes


def test_live_figures_are_plausible(snapshot: Snapshot) -> None:
    for gpu in snapshot.gpus:
        if gpu.power_w is not None and gpu.power_limit_w is not None:
            assert 0 < gpu.power_w < 2 * gpu.power_limit_w
        if gpu.sm_clock_hz is not None and gpu.sm_clock_max_hz is not None:
            assert 0 < gpu.sm_clock_hz <= gpu.sm_clock_max_hz
        if gpu.temperature_c is not None:
            assert 0 < gpu.temperature_c < 120
        if gpu.utilisation_share is not None:
            assert 0 <= gpu.utilisation_share <= 1


def test_the_datasheet_knows_the_gpu_by_its_driver_name(snapshot: Snapshot) -> None:
    for device in snapshot.devices:
        row = find_datasheet(device.name, memory_bytes=device.memory_bytes)
        if row is None:
            pytest.skip(f"no datasheet for {device.name}")
        assert device.peak_flops == row.peak_flops
        assert device.compute_capability == row.compute_capability
        assert device.bf16 == row.bf16


@pytest.mark.parametrize("value", ["", "-1", "99"])
def test_hiding_every_gpu_hides_them(value: str) -> None:
    with GpuReader(environ={**os.environ, "CUDA_VISIBLE_DEVICES": value}) as reader:
        snapshot = reader.snapshot()
        assert snapshot.gpus == ()
        assert snapshot.notes
        assert reader.snapshot(hidden=True).gpus


def test_an_id_prefix_selects_its_gpu(snapshot: Snapshot) -> None:
    last = snapshot.gpus[-1]
    assert last.uuid is not None
    with GpuReader(environ={"CUDA_VISIBLE_DEVICES": last.uuid[:16]}) as reader:
        assert [gpu.uuid for gpu in reader.snapshot().gpus] == [last.uuid]


def test_a_snapshot_survives_json(snapshot: Snapshot) -> None:
    assert decode(Snapshot, encode(snapshot)) == snapshot


def test_a_closed_reader_says_so() -> None:
    reader = GpuReader()
    reader.close()
    assert reader.snapshot().missing["gpus"] == "the reader was closed"
