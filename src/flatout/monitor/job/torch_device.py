"""What a job's own torch reports of its GPU, without ever waiting for the GPU.

Nothing here imports torch: the job has.  A GPU runs behind the host, so the host's clock cannot say whether
the GPU was idle while the host waited for a batch.  Two events in the GPU's stream can: one recorded before
the wait, one after it.  If the GPU still had work, they happen at once, one after the other; the time between
them is the time it stood still.  Events are read later, when they have happened.

A loss on the GPU is copied to pinned memory in the stream, and read once the copy is done: asking a tensor
for its value would make the host wait for the GPU at every step.

AMD's GPUs answer the same calls of torch;  NVML does not know them, so this module also reports their name
and memory.  For Apple's GPU torch reports memory, and no times that can be read without waiting.  Neither has
been tried on such a machine: tests imitate torch's answers there.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from typing import Any

from flatout.measure.clock import EXCLUDED, REST, WAIT, now
from flatout.monitor.job.channel import NUM_PHASES, TEXT_BYTES

UNKNOWN = math.nan
MARKS_EVERY_S = 0.004  # an event costs a few microseconds: shorter steps are marked now and then
MEMORY_EVERY_S = 0.5  # asking the allocator costs some tens of microseconds
LOSS_EVERY_S = 0.1
MOST_PENDING = 256


def device_of_job() -> DeviceSide | None:
    """Find the GPU that the job computes on, once it does."""
    torch = torch_of_job()
    if torch is not None:
        return CudaSide(torch)
    torch = sys.modules.get("torch")
    apple = getattr(torch, "mps", None)  # every build has it; absent while torch is still being imported
    if torch is None or apple is None or not torch.backends.mps.is_available():
        return None
    return AppleSide(apple) if apple.current_allocated_memory() > 0 else None


def torch_of_job() -> Any:
    """Return the job's torch if the job has started CUDA with it, else None."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # absent while torch is still being imported
    return torch if cuda is not None and cuda.is_initialized() else None


class DeviceSide:
    """What every vendor's GPU reports; any method may do nothing."""

    gpu_id = b""  # NVML's id
    name = b""  # of a GPU that NVML does not know

    def __init__(self) -> None:
        self.totals_s = [UNKNOWN] * NUM_PHASES
        self.memory = (UNKNOWN, UNKNOWN, UNKNOWN)  # allocated, reserved, most allocated
        self.device_memory = (UNKNOWN, UNKNOWN)  # used, total: of a GPU that NVML does not know
        self.loss: float | None = None
        self._memory_at_s = -math.inf

    def before_wait(self, now_s: float) -> None:
        """Note that the host begins to wait for a batch."""

    def after_wait(self) -> None:
        """Note that the host has its batch."""

    def pause(self) -> None:
        """Count what follows as no part of a step."""

    def note_loss(self, loss: Any) -> None:
        """Ask for the value of a tensor on the GPU; `loss` has it once the GPU got there."""

    def collect(self) -> None:
        """Take in whatever has happened by now."""
        now_s = now()
        if now_s - self._memory_at_s >= MEMORY_EVERY_S:
            self._memory_at_s = now_s
            self._read_memory()

    def _read_memory(self) -> None:
        raise NotImplementedError


class CudaSide(DeviceSide):
    """The GPU of this process, NVIDIA's or AMD's, on the stream that is current when a step ends."""

    def __init__(self, torch: Any) -> None:
        super().__init__()
        self._torch = torch
        self.totals_s = [0.0] * NUM_PHASES
        self.gpu_id = _gpu_id(torch)
        self._is_amd = getattr(getattr(torch, "version", None), "hip", None) is not None
        if self._is_amd:
            self.name = _text(torch.cuda.get_device_name())
        self._free: list[Any] = []
        self._pending: deque[tuple[int, Any]] = deque()  # (what the stream works for from here on, event)
        self._marked_at_s = 0.0
        self._is_marking = False
        self._loss_at_s = 0.0
        self._loss_buffer: Any = None
        self._loss_event: Any = None

    def before_wait(self, now_s: float) -> None:
        self._is_marking = now_s - self._marked_at_s >= MARKS_EVERY_S and len(self._pending) < MOST_PENDING
        if self._is_marking:
            self._marked_at_s = now_s
            self._mark(WAIT)
        elif self._pending and self._pending[-1][0] != EXCLUDED:
            self._mark(EXCLUDED)

    def after_wait(self) -> None:
        if self._is_marking:
            self._mark(REST)

    def pause(self) -> None:
        if self._pending and self._pending[-1][0] != EXCLUDED:
            self._mark(EXCLUDED)

    def _mark(self, region: int) -> None:
        if self._torch.cuda.is_current_stream_capturing():
            return
        event = self._free.pop() if self._free else self._torch.cuda.Event(enable_timing=True)
        event.record()
        self._pending.append((region, event))

    def note_loss(self, loss: Any) -> None:
        now_s = now()
        if self._loss_event is not None or now_s - self._loss_at_s < LOSS_EVERY_S or loss.numel() != 1:
            return
        if self._torch.cuda.is_current_stream_capturing():
            return
        self._loss_at_s = now_s
        if self._loss_buffer is None:
            self._loss_buffer = self._torch.empty(1, pin_memory=True)
        self._loss_buffer.copy_(loss.detach().reshape(1).float(), non_blocking=True)
        self._loss_event = self._torch.cuda.Event()
        self._loss_event.record()

    def collect(self) -> None:
        while len(self._pending) > 1 and self._pending[1][1].query():
            region, event = self._pending.popleft()
            if region < NUM_PHASES:
                self.totals_s[region] += event.elapsed_time(self._pending[0][1]) / 1e3
            self._free.append(event)
        if self._loss_event is not None and self._loss_event.query():
            self.loss = float(self._loss_buffer[0])
            self._loss_event = None
        super().collect()

    def _read_memory(self) -> None:
        cuda = self._torch.cuda
        asked = (cuda.memory_allocated(), cuda.memory_reserved(), cuda.max_memory_allocated())
        self.memory = (float(asked[0]), float(asked[1]), float(asked[2]))
        if self._is_amd:
            free, total = cuda.mem_get_info()
            self.device_memory = (float(total - free), float(total))


class AppleSide(DeviceSide):
    """Apple's GPU: what its allocator holds, and how much of the machine's memory it may take."""

    name = b"Apple GPU"

    def __init__(self, apple: Any) -> None:
        super().__init__()
        self._apple = apple  # torch.mps

    def _read_memory(self) -> None:
        driver = float(self._apple.driver_allocated_memory())
        self.memory = (float(self._apple.current_allocated_memory()), driver, UNKNOWN)
        # The driver's is this process's alone; others' is not told.
        self.device_memory = (driver, float(self._apple.recommended_max_memory()))


def _gpu_id(torch: Any) -> bytes:
    """Return NVML's id of the current GPU; empty if this torch does not tell it."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return b"" if uuid is None else _text(str(uuid))


def _text(text: str) -> bytes:
    return text.encode("ascii", errors="ignore")[:TEXT_BYTES]
