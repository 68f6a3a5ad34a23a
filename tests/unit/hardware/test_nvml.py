"""The reader against recorded answers, refusals, MIG, and a GPU that is lost while it is read."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.codec import decode, encode
from flatout.hardware.nvml import GpuReader, read_gpus
from flatout.hardware.snapshot import GpuSnapshot, Snapshot
from flatout.testing.played_nvml import (
    BINDINGS,
    H200_UUID,
    LOST,
    PlayedGpu,
    PlayedNvml,
    RefusedAnswer,
    played_mig_gpu,
)


def take(*gpus: PlayedGpu, visible: str | None = None, hidden: bool = False, **options: Any) -> Snapshot:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with GpuReader(PlayedNvml(*gpus, **options), environ=environ, clock=lambda: 12.5) as reader:
        return reader.snapshot(hidden=hidden)


def called(name: str, uuid: str) -> PlayedGpu:
    gpu = PlayedGpu()
    gpu.answers |= {"nvmlDeviceGetName": name, "nvmlDeviceGetUUID": uuid}
    return gpu


def unexplained(gpu: GpuSnapshot) -> list[str]:
    """Fields that are None without a reason; a whole GPU has no MIG number."""
    names = {field.name for field in dataclasses.fields(gpu)} - {"mig_index"}
    return [name for name in sorted(names) if getattr(gpu, name) is None and not gpu.missing.get(name)]


def test_a_recorded_h200_is_read_whole() -> None:
    snapshot = take(PlayedGpu())
    (gpu,) = snapshot.gpus
    assert (snapshot.taken_at_s, snapshot.driver_version, snapshot.cuda_version) == (
        12.5,
        "580.159.04",
        "13.0",
    )
    assert gpu.missing == {}
    assert unexplained(gpu) == []
    assert (gpu.index, gpu.cuda_index, gpu.name, gpu.uuid) == (0, 0, "NVIDIA H200", H200_UUID)
    assert gpu.memory_total_bytes == 150754820096
    assert gpu.memory_used_bytes == 650969088
    assert gpu.memory_reserved_bytes == 644939776
    assert gpu.power_w == pytest.approx(83.511)
    assert gpu.power_limit_w == 700
    assert gpu.sm_clock_hz == 1980e6
    assert gpu.memory_clock_max_hz == 3201e6
    assert gpu.temperature_c == 38
    assert gpu.utilisation_share == 0.01
    assert gpu.throttle_reasons == ()
    assert (gpu.pcie_generation, gpu.pcie_width) == (5, 16)
    assert gpu.processes is not None
    assert [(p.pid, p.name, p.used_bytes, p.kind) for p in gpu.processes] == [
        (433, "python3", 641728512, "compute")
    ]
    assert gpu.mig_enabled is False


def test_the_device_of_a_snapshot_has_the_peaks_of_its_datasheet() -> None:
    (device,) = take(PlayedGpu()).devices
    assert not device.simulated
    assert device.datasheet == "H200"
    assert device.memory_bytes == 150754820096
    assert device.peak_flops["bf16"] == 989.4e12


@given(st.sampled_from(sorted(PlayedGpu().answers)))
def test_any_refused_question_leaves_a_reason_and_no_number(question: str) -> None:
    gpu = PlayedGpu()
    gpu.answers[question] = RefusedAnswer(BINDINGS.NVML_ERROR_NOT_SUPPORTED)
    if question == "nvmlDeviceGetMemoryInfo":
        assert "memory_total_bytes" in take(gpu).gpus[0].missing
    (read,) = take(gpu).gpus
    assert unexplained(read) == []
    assert all("Not Supported" in reason for reason in read.missing.values())
    assert not read.lost


@given(st.integers(min_value=0, max_value=25))
def test_a_gpu_lost_at_any_question_keeps_what_it_said(lost_after: int) -> None:
    snapshot = take(PlayedGpu(lost_after=lost_after), called("NVIDIA L4", "GPU-bbbb"))
    assert len(snapshot.gpus) == 2
    lost, sound = snapshot.gpus
    assert unexplained(lost) == []
    assert sound.missing == {}
    if lost.lost:
        assert lost not in snapshot.computing
        assert any("lost" in reason for reason in lost.missing.values())


@pytest.mark.parametrize("lost_after", [0, 1, 4])
def test_a_lost_gpu_is_not_asked_again(lost_after: int) -> None:
    gpu = PlayedGpu(lost_after=lost_after)
    (read,) = take(gpu).gpus
    assert read.lost
    assert gpu.num_asked == lost_after + 1


def test_a_gpu_without_a_handle_is_listed_with_the_reason() -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetHandleByIndex"] = LOST
    (read,) = take(gpu).gpus
    assert read.name is None
    assert read.lost
    assert "lost" in read.missing["name"]
    assert read.device is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (BINDINGS.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver"),
        (BINDINGS.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (BINDINGS.NVML_ERROR_NO_PERMISSION, "NVML does not start: NVML: Insufficient Permissions"),
    ],
)
def test_no_driver_is_a_snapshot_with_a_reason(code: int, words: str) -> None:
    snapshot = take(PlayedGpu(), nvmlInit=RefusedAnswer(code))
    assert snapshot.gpus == ()
    assert snapshot.driver_version is None
    assert set(snapshot.missing) == {"gpus", "driver_version", "cuda_version"}
    assert words in snapshot.missing["gpus"]


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in read_gpus().missing["gpus"]


def test_a_refused_count_leaves_no_gpus_and_a_reason() -> None:
    snapshot = take(PlayedGpu(), nvmlDeviceGetCount=RefusedAnswer(BINDINGS.NVML_ERROR_UNKNOWN))
    assert snapshot.gpus == ()
    assert snapshot.missing["gpus"] == "NVML: Unknown Error"


def test_nvml_is_let_go_once() -> None:
    nvml = PlayedNvml(PlayedGpu())
    reader = GpuReader(nvml, environ={})
    with reader:
        reader.snapshot()
    reader.close()
    assert [call for call in nvml.calls if call in ("nvmlInit", "nvmlShutdown")] == [
        "nvmlInit",
        "nvmlShutdown",
    ]
    assert reader.snapshot().missing["gpus"] == "the reader was closed"


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-aaaa", "GPU-bbbb", "GPU-cccc"]),
        ("2,0", ["GPU-aaaa", "GPU-cccc"]),
        ("1,-1,0", ["GPU-bbbb"]),
        ("GPU-cc", ["GPU-cccc"]),
        ("", []),
    ],
)
def test_only_visible_gpus_are_read(visible: str | None, uuids: list[str]) -> None:
    gpus = [called("NVIDIA L4", uuid) for uuid in ("GPU-aaaa", "GPU-bbbb", "GPU-cccc")]
    snapshot = take(*gpus, visible=visible)
    assert [gpu.uuid for gpu in snapshot.gpus] == uuids
    # Two questions tell which GPU it is; a hidden one is asked no more.
    assert [gpu.num_asked == 2 for gpu in gpus] == [
        gpu.answers["nvmlDeviceGetUUID"] not in uuids for gpu in gpus
    ]


def test_cuda_numbers_follow_the_order_of_the_variable() -> None:
    gpus = [called("NVIDIA L4", uuid) for uuid in ("GPU-aaaa", "GPU-bbbb", "GPU-cccc")]
    snapshot = take(*gpus, visible="2,0", hidden=True)
    assert [gpu.cuda_index for gpu in snapshot.gpus] == [1, None, 0]
    assert snapshot.gpus[1].missing == {"cuda_index": "hidden by CUDA_VISIBLE_DEVICES"}


def test_gpus_that_differ_come_with_a_warning_about_their_order() -> None:
    gpus = (called("NVIDIA L4", "GPU-aaaa"), called("NVIDIA H200", "GPU-bbbb"))
    assert "CUDA_DEVICE_ORDER" in take(*gpus).notes[0]
    reader = GpuReader(PlayedNvml(*gpus), environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert reader.snapshot().notes == ()


def test_a_gpu_in_mig_mode_lists_its_instances() -> None:
    snapshot = take(played_mig_gpu())
    (gpu,) = snapshot.gpus
    assert gpu.mig_enabled
    assert [(i.mig_index, i.uuid, i.cuda_index) for i in gpu.instances] == [
        (0, "MIG-1111", None),
        (2, "MIG-2222", None),
    ]
    assert snapshot.computing == gpu.instances
    for instance in gpu.instances:
        assert unexplained(instance) == []
        assert instance.memory_total_bytes == 10 * 2**30
        assert "MIG instance" in instance.missing["power_w"]
    device = snapshot.devices[0]
    assert device.peak_flops == {}
    assert "MIG instance" in device.missing["peak_flops"]


@pytest.mark.parametrize("visible", ["MIG-2222", "MIG-GPU-aaaa/8/0"])
def test_a_named_mig_instance_is_the_only_one(visible: str) -> None:
    (gpu,) = take(played_mig_gpu(), called("NVIDIA L4", "GPU-bbbb"), visible=visible).gpus
    assert [(i.uuid, i.cuda_index) for i in gpu.instances] == [("MIG-2222", 0)]


def test_an_instance_named_like_its_gpu_does_not_get_the_gpus_peaks() -> None:
    gpu = played_mig_gpu()
    for instance in gpu.instances:
        if instance is not None:
            instance.answers["nvmlDeviceGetName"] = "NVIDIA A100-SXM4-80GB"
    names = [part.name for part in take(gpu).computing]
    assert names == ["NVIDIA A100-SXM4-80GB MIG 0", "NVIDIA A100-SXM4-80GB MIG 2"]


def test_a_snapshot_survives_json() -> None:
    snapshot = take(played_mig_gpu(), PlayedGpu(lost_after=6))
    assert decode(Snapshot, encode(snapshot)) == snapshot
