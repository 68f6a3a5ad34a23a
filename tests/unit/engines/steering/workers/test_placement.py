"""Replicas where the model fits, shards where it does not, and the reason for either."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from flatout.engines.steering.workers.placement import (
    GpuRoom,
    Placement,
    count_weights_bytes,
    list_gpus,
    place_replicas,
)
from flatout.ground.errors import BadInput, BatchDoesNotFit
from flatout.hardware.snapshot import GpuSnapshot, Snapshot

GIB = 2**30


def rooms(*free_gib: float) -> list[GpuRoom]:
    return [GpuRoom(name=f"GPU-{i}", free_bytes=int(free * GIB)) for i, free in enumerate(free_gib)]


def names(placement: Placement) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(gpu.name for gpu in gpus) for gpus in placement.replicas)


def test_a_model_that_fits_has_a_replica_on_each_gpu() -> None:
    decision = place_replicas(weights_bytes=16 * GIB, gpus=rooms(24, 24))
    assert names(decision.value) == (("GPU-0",), ("GPU-1",))
    assert not decision.value.is_sharded
    assert "16.0 GiB fit in the 18.0 GiB" in decision.reason
    assert str(decision.value) == "2, one per GPU"


def test_workers_limit_the_replicas_and_the_roomiest_come_first() -> None:
    decision = place_replicas(weights_bytes=GIB, gpus=rooms(8, 24, 16), workers=2)
    assert names(decision.value) == (("GPU-1",), ("GPU-2",))


def test_a_gpu_that_others_fill_is_left_out() -> None:
    decision = place_replicas(weights_bytes=10 * GIB, gpus=rooms(24, 2))
    assert names(decision.value) == (("GPU-0",),)
    assert "1 of 2 GPUs have too little free" in decision.reason


def test_a_model_that_does_not_fit_is_sharded_over_as_few_as_hold_it() -> None:
    decision = place_replicas(weights_bytes=30 * GIB, gpus=rooms(24, 24, 24, 24))
    assert names(decision.value) == (("GPU-0", "GPU-1"), ("GPU-2", "GPU-3"))
    assert decision.value.is_sharded
    assert "do not fit in the 18.0 GiB" in decision.reason and "2 together hold them" in decision.reason


def test_what_fits_nowhere_is_refused_with_both_figures() -> None:
    with pytest.raises(BatchDoesNotFit, match=r"140 GiB do not fit: 2 GPUs offer 36\.0 GiB"):
        place_replicas(weights_bytes=140 * GIB, gpus=rooms(24, 24))


def test_without_a_gpu_the_workers_share_the_cpu() -> None:
    assert place_replicas(weights_bytes=1, gpus=()).value.replicas == ((),)
    decision = place_replicas(weights_bytes=1, gpus=rooms(24), workers=3, device="cpu")
    assert (decision.value.replicas, decision.reason) == (((), (), ()), "the CPU was asked for")
    with pytest.raises(BadInput, match="no GPU is visible"):
        place_replicas(weights_bytes=1, gpus=(), device="cuda")
    with pytest.raises(BadInput, match="--workers 0"):
        place_replicas(weights_bytes=1, gpus=(), workers=0)


@given(st.lists(st.integers(1, 80), min_size=1, max_size=6), st.integers(1, 300))
def test_every_replica_holds_the_weights_and_no_gpu_has_two(free_gib: list[int], weights_gib: int) -> None:
    gpus = rooms(*free_gib)
    try:
        replicas = place_replicas(weights_bytes=weights_gib * GIB, gpus=gpus).value.replicas
    except BatchDoesNotFit:
        assert sum(gpu.usable_bytes for gpu in gpus) < weights_gib * GIB
        return
    used = [gpu.name for replica in replicas for gpu in replica]
    assert replicas and len(set(used)) == len(used)
    for replica in replicas:
        assert sum(gpu.usable_bytes for gpu in replica) >= weights_gib * GIB
    if any(gpu.usable_bytes >= weights_gib * GIB for gpu in gpus):
        assert all(len(replica) == 1 for replica in replicas)


def test_gpus_are_named_as_cuda_is_told_of_them() -> None:
    snapshot = Snapshot(
        taken_at_s=0.0,
        gpus=(
            GpuSnapshot(index=0, name="A", uuid="GPU-a", memory_free_bytes=5, compute_capability="7.5"),
            GpuSnapshot(index=1, name="B", uuid=None, cuda_index=1, memory_free_bytes=6),
            GpuSnapshot(index=2, name="C", uuid="GPU-c", memory_free_bytes=None),
        ),
    )
    assert list_gpus(snapshot) == [
        GpuRoom(name="GPU-a", free_bytes=5, capability="7.5"),
        GpuRoom(name="1", free_bytes=6, index=1),
    ]


def test_bytes_are_those_of_the_type_the_model_is_loaded_in(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5, dtype=torch.float16)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(7)}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    gpu = rooms(24)
    old = [GpuRoom(name="GPU-old", free_bytes=24 * GIB, capability="6.1")]
    turing = [GpuRoom(name="GPU-t4", free_bytes=16 * GIB, capability="7.5")]
    assert count_weights_bytes(tmp_path, dtype="auto", gpus=()) == 4 * 22
    assert count_weights_bytes(tmp_path, dtype="float16", gpus=()) == 2 * 22
    assert count_weights_bytes(tmp_path, dtype="auto", gpus=gpu) == 2 * 22
    assert count_weights_bytes(tmp_path, dtype="auto", gpus=turing) == 2 * 22
    assert count_weights_bytes(tmp_path, dtype="auto", gpus=[*gpu, *old]) == 4 * 22
    assert count_weights_bytes(tmp_path, dtype="float32", gpus=gpu) == 4 * 22


@pytest.mark.parametrize(
    "content", [b"", b"123", struct.pack("<Q", 5) + b"{", struct.pack("<Q", 1 << 60), b"\0" * 9]
)
def test_a_torn_weights_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match=r"model\.safetensors cannot be read: .*\(copy or download it again\)"):
        count_weights_bytes(tmp_path, dtype="auto", gpus=())


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no pickle is read"):
        count_weights_bytes(tmp_path, dtype="auto", gpus=())
