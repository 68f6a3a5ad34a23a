"""What a snapshot answers about itself."""

from __future__ import annotations

import dataclasses

import pytest

from flatout.hardware.snapshot import GpuSnapshot, Snapshot

WHOLE = GpuSnapshot(
    index=1,
    name="NVIDIA L4",
    uuid="GPU-a",
    compute_capability="8.9",
    memory_total_bytes=23034 * 2**20,
    mig_enabled=False,
)


def test_the_device_of_a_gpu() -> None:
    device = WHOLE.device
    assert device is not None
    assert (device.name, device.uuid, device.index) == ("NVIDIA L4", "GPU-a", 1)
    assert device.datasheet == "L4"
    assert not device.simulated


def test_a_gpu_without_a_name_is_no_device() -> None:
    gpu = dataclasses.replace(WHOLE, name=None)
    assert gpu.device is None
    assert Snapshot(taken_at_s=0.0, gpus=(gpu,)).devices == ()


def test_a_job_computes_on_whole_gpus_and_on_instances_but_not_on_lost_ones() -> None:
    instance = dataclasses.replace(WHOLE, uuid="MIG-a", mig_index=0)
    gone = dataclasses.replace(WHOLE, uuid="MIG-b", mig_index=1, lost=True)
    split = dataclasses.replace(WHOLE, mig_enabled=True, instances=(instance, gone))
    lost = dataclasses.replace(WHOLE, uuid="GPU-c", lost=True)
    unknown = dataclasses.replace(WHOLE, uuid="GPU-d", mig_enabled=None)
    snapshot = Snapshot(taken_at_s=0.0, gpus=(WHOLE, split, lost, unknown))
    assert [gpu.uuid for gpu in snapshot.computing] == ["GPU-a", "MIG-a", "GPU-d"]


def test_a_machine_without_gpus_says_why() -> None:
    assert Snapshot(taken_at_s=0.0).why_no_gpu == "the driver sees no GPU"
    assert Snapshot(taken_at_s=0.0, notes=("hidden",)).why_no_gpu == "hidden"
    assert (
        Snapshot(taken_at_s=0.0, notes=("hidden",), missing={"gpus": "no driver"}).why_no_gpu == "no driver"
    )


def test_a_snapshot_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WHOLE.name = "other"  # type: ignore[misc]
