"""The GPU's own clock, played: events that happen later than they are recorded, and a loss that is not ready.

The class runs on a real torch and a real GPU unchanged; the marked test says so where there is one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flatout.measure import PHASES
from flatout.measure.clock import REST, WAIT
from flatout.monitor.job import torch_device
from flatout.monitor.job.channel import read_channel
from flatout.monitor.job.reporter import Reporter
from flatout.monitor.job.torch_device import AppleSide, CudaSide, device_of_job, torch_of_job


@dataclass
class PlayedCuda:
    """A stream whose work ends when the test says; asking for its end is counted as a wait."""

    host_s: float = 0.0
    stream_s: float = 0.0  # when the work that was given so far will be done
    done_s: float = 0.0
    num_events: int = 0
    num_synchronised: int = 0
    capturing: bool = False
    asked_memory: int = 0
    events: list[Any] = field(default_factory=list)

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(uuid="19754993-bb37-74c5-28e6-909b2c7e2234")

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def memory_allocated(self) -> int:
        self.asked_memory += 1
        return 7

    def memory_reserved(self) -> int:
        return 9

    def max_memory_allocated(self) -> int:
        return 8

    def synchronize(self) -> None:
        self.num_synchronised += 1

    def Event(self, *, enable_timing: bool = False) -> Any:  # noqa: N802
        self.num_events += 1
        return PlayedEvent(self)

    def launch(self, seconds: float) -> None:
        self.stream_s = max(self.stream_s, self.host_s) + seconds


class PlayedEvent:
    def __init__(self, cuda: PlayedCuda) -> None:
        self.cuda = cuda
        self.at_s = math.nan

    def record(self) -> None:
        self.at_s = max(self.cuda.stream_s, self.cuda.host_s)

    def query(self) -> bool:
        return self.at_s <= self.cuda.done_s

    def elapsed_time(self, end: PlayedEvent) -> float:
        return (end.at_s - self.at_s) * 1e3

    def synchronize(self) -> None:
        self.cuda.num_synchronised += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    cuda = PlayedCuda()
    monkeypatch.setattr(torch_device, "now", lambda: cuda.host_s)
    return cuda


def side_of(cuda: PlayedCuda) -> CudaSide:
    return CudaSide(SimpleNamespace(cuda=cuda))


def play(cuda: PlayedCuda, side: CudaSide, *, wait_s: float, launch_s: float, gpu_s: float) -> None:
    """A step: wait for a batch, launch its kernels, and let the GPU run behind."""
    side.before_wait(cuda.host_s)
    cuda.host_s += wait_s
    side.after_wait()
    cuda.host_s += launch_s
    cuda.launch(gpu_s)


def shares(side: CudaSide) -> dict[str, float]:
    total = sum(side.totals_s)
    return {phase: seconds / total for phase, seconds in zip(PHASES, side.totals_s, strict=True)}


def test_a_gpu_that_stands_still_while_the_host_waits_shows_it(cuda: PlayedCuda) -> None:
    side = side_of(cuda)
    for _ in range(50):
        play(cuda, side, wait_s=0.08, launch_s=0.01, gpu_s=0.01)
    cuda.done_s = cuda.stream_s
    side.collect()
    assert shares(side)["wait"] == pytest.approx(0.8, abs=0.05)


def test_a_gpu_that_is_behind_is_not_starved_by_a_host_that_waits(cuda: PlayedCuda) -> None:
    side = side_of(cuda)
    for _ in range(50):
        play(cuda, side, wait_s=0.08, launch_s=0.01, gpu_s=0.2)
    cuda.done_s = cuda.stream_s
    side.collect()
    assert shares(side)["wait"] == pytest.approx(0.0, abs=0.02)


def test_events_that_have_not_happened_are_left_for_later_and_nobody_waits(cuda: PlayedCuda) -> None:
    side = side_of(cuda)
    for _ in range(5):
        play(cuda, side, wait_s=0.01, launch_s=0.01, gpu_s=1.0)
    side.collect()
    before = sum(side.totals_s)
    cuda.done_s = cuda.stream_s
    side.collect()
    assert sum(side.totals_s) > before
    assert cuda.num_synchronised == 0


def test_events_are_used_again_and_bounded(cuda: PlayedCuda) -> None:
    side = side_of(cuda)
    for _ in range(1000):
        play(cuda, side, wait_s=0.01, launch_s=0.01, gpu_s=0.005)
        cuda.done_s = cuda.stream_s
        side.collect()
    assert cuda.num_events < 10
    for _ in range(1000):
        play(cuda, side, wait_s=0.01, launch_s=0.01, gpu_s=0.005)  # nothing is collected
    assert cuda.num_events < torch_device.MOST_PENDING + 10


def test_short_steps_are_marked_now_and_then(cuda: PlayedCuda) -> None:
    side = side_of(cuda)
    for _ in range(1000):
        play(cuda, side, wait_s=0.00005, launch_s=0.00005, gpu_s=0.00001)
    # A tenth of a second: at most one step in four milliseconds, three events each.
    assert 3 <= cuda.num_events <= 3 * (0.1 / torch_device.MARKS_EVERY_S + 1)
    cuda.done_s = cuda.stream_s
    side.collect()
    # The GPU still works for a fifth of the wait.
    assert shares(side)["wait"] == pytest.approx(0.4, abs=0.05)


def test_a_pause_belongs_to_no_phase(cuda: PlayedCuda) -> None:
    side = side_of(cuda)
    play(cuda, side, wait_s=0.01, launch_s=0.01, gpu_s=0.01)
    side.pause()
    cuda.launch(100.0)
    cuda.host_s += 100.0
    play(cuda, side, wait_s=0.01, launch_s=0.01, gpu_s=0.01)
    cuda.done_s = cuda.stream_s
    side.collect()
    assert side.totals_s[WAIT] + side.totals_s[REST] < 1.0


def test_nothing_is_recorded_into_a_graph_under_capture(cuda: PlayedCuda) -> None:
    side = side_of(cuda)
    cuda.capturing = True
    play(cuda, side, wait_s=0.01, launch_s=0.01, gpu_s=0.01)
    assert cuda.num_events == 0


def test_memory_is_asked_twice_a_second_at_most(cuda: PlayedCuda) -> None:
    side = side_of(cuda)
    for _ in range(100):
        cuda.host_s += 0.02
        side.collect()
    assert side.memory == (7.0, 9.0, 8.0)
    assert cuda.asked_memory <= 5
    assert side.gpu_id == b"19754993-bb37-74c5-28e6-909b2c7e2234"


def test_a_job_without_torch_or_without_cuda_has_no_device_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_of_job() is None
    half_imported = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", half_imported)
    assert torch_of_job() is None
    half_imported.cuda = SimpleNamespace(is_initialized=lambda: False)  # type: ignore[attr-defined]
    assert torch_of_job() is None
    half_imported.cuda = SimpleNamespace(is_initialized=lambda: True)  # type: ignore[attr-defined]
    assert torch_of_job() is half_imported


def torch_for_amd(cuda: PlayedCuda) -> ModuleType:
    """A build of torch for ROCm, whose `cuda` is AMD's."""
    torch = ModuleType("torch")
    torch.version = SimpleNamespace(hip="7.0.51831", cuda=None)  # type: ignore[attr-defined]
    torch.cuda = cuda  # type: ignore[attr-defined]
    cuda.get_device_name = lambda: "AMD Instinct MI300X"  # type: ignore[attr-defined]
    cuda.mem_get_info = lambda: (2**30, 192 * 2**30)  # type: ignore[attr-defined]
    return torch


def torch_for_apple(cuda: PlayedCuda) -> ModuleType:
    """A build of torch for macOS: `cuda` is there and is never started."""
    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(is_initialized=lambda: False)  # type: ignore[attr-defined]
    torch.mps = SimpleNamespace(  # type: ignore[attr-defined]
        current_allocated_memory=lambda: 3 * 2**30,
        driver_allocated_memory=lambda: 5 * 2**30,
        recommended_max_memory=lambda: 48 * 2**30,
    )
    torch.backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: True))  # type: ignore[attr-defined]
    return torch


@pytest.mark.parametrize(
    ("build", "kind", "name", "device", "memory"),
    [
        (torch_for_amd, CudaSide, "AMD Instinct MI300X", (191, 192), (7, 9, 8)),
        (torch_for_apple, AppleSide, "Apple GPU", (5, 48), (3 * 2**30, 5 * 2**30, None)),
    ],
)
def test_other_makers_gpus_are_told_by_the_jobs_torch(
    build: Callable[[PlayedCuda], ModuleType],
    kind: type,
    name: str,
    device: tuple[int, int],
    memory: tuple[int, int, int | None],
    cuda: PlayedCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the channel, as a monitor reads it."""
    monkeypatch.setitem(sys.modules, "torch", build(cuda))
    assert isinstance(device_of_job(), kind)
    reporter = Reporter(tmp_path / "job.channel")
    cuda.host_s = 100.0
    for _ in range(3):
        reporter.before_wait()
        reporter.after_wait()
        reporter.step()
        reporter.write()
    found = read_channel(tmp_path / "job.channel")
    assert found is not None
    assert found.device_name == name
    assert (found.device_used_bytes, found.device_total_bytes) == tuple(2**30 * size for size in device)
    assert (found.allocated_bytes, found.reserved_bytes, found.peak_allocated_bytes) == memory
    assert (found.device_s is None) == (kind is AppleSide)


def test_the_torch_of_this_machine_is_asked_without_harm() -> None:
    import torch

    side = device_of_job()
    if not torch.cuda.is_initialized() and not torch.backends.mps.is_available():
        assert side is None


@pytest.mark.gpu
def test_on_a_gpu_a_loss_is_read_without_waiting_for_it() -> None:
    import torch

    loss = torch.full((), 0.75, device="cuda", requires_grad=True) * 1.0
    side = CudaSide(torch_of_job())
    side.note_loss(loss)
    torch.cuda.synchronize()
    side.collect()
    assert side.loss == 0.75
    assert side.memory[0] > 0
    assert len(side.gpu_id) == 36
    for _ in range(3):
        side.before_wait(torch_device.now())
        side.after_wait()
        torch.ones(1000, 1000, device="cuda") @ torch.ones(1000, 1000, device="cuda")
    torch.cuda.synchronize()
    side.collect()
    assert sum(side.totals_s) > 0
