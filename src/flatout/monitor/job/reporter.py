"""The job's side of the channel: counts steps, times waits, and writes the totals now and then.

A step costs a few microseconds: two readings of the clock and, at most a hundred times a second, one small
write.  It never waits for the GPU, and its own failures never reach the job: a value that is not a number is
unknown, and a channel that cannot be written is closed.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flatout.measure.clock import EXCLUDED, WAIT, Clock, now
from flatout.monitor.job.channel import CHECKSUM, LAYOUT, MAGIC, NUM_PHASES, SLOT_BYTES, VERSION
from flatout.monitor.job.torch_device import UNKNOWN, DeviceSide, device_of_job

WRITE_EVERY_S = 0.01  # no monitor reads more often than ten times a second
_NO_DEVICE = [UNKNOWN] * NUM_PHASES


class ChannelWriter:
    """The job's end of the channel.

    A write is one system call of about a microsecond into the page cache.  One that fails, as on a full disk,
    closes the channel: the job goes on, and `error` says what happened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: str | None = None
        self._number = 0
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(
        self,
        scalars: list[float],
        host_s: list[float],
        device_s: list[float],
        gpu_id: bytes = b"",
        device_name: bytes = b"",
    ) -> None:
        """Write one record; `scalars` are in the order of SCALARS, seconds in that of PHASES."""
        if self._file is None:
            return
        self._number += 1
        body = LAYOUT.pack(MAGIC, VERSION, self._number, *scalars, *host_s, *device_s, gpu_id, device_name)
        offset = (self._number % 2) * SLOT_BYTES
        try:
            os.pwrite(self._file, body + CHECKSUM.pack(zlib.crc32(body)), offset)
        except OSError as error:
            self.error = f"{self.path}: {error.strerror}"
            self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Reporter:
    """One per process; only the thread that made it is timed."""

    def __init__(self, channel: Path) -> None:
        self.steps = 0
        self.samples = 0
        self.is_explicit = False  # the job says itself where its steps end
        self._pid = os.getpid()
        self._writer = ChannelWriter(channel)
        self._clock = Clock()
        self._clock.enter(EXCLUDED)  # nothing before the first step is part of one
        self._host_s = [0.0] * NUM_PHASES
        self._device: DeviceSide | None = None
        self._asks_device = True
        self._sees_data = False
        self._knows_samples = False
        self._loss: float | None = None
        self._learning_rate = UNKNOWN
        self._written_at_s = 0.0

    def begin(self) -> None:
        """Start a loop, or continue it."""
        if self._clock.stack[-1] == EXCLUDED:
            self._clock.leave()

    def pause(self) -> None:
        """Count what follows (an evaluation, the end) as no part of a step."""
        if self._clock.stack[-1] != EXCLUDED:
            self._clock.enter(EXCLUDED)
            if self._device is not None:
                self._ask_device(self._device.pause)

    def before_wait(self) -> None:
        self._sees_data = True
        if self._device is not None:
            self._ask_device(self._device.before_wait, now())
        self._clock.enter(WAIT)

    def after_wait(self, batch: Any = None) -> None:
        self._clock.leave()
        if self._device is not None:
            self._ask_device(self._device.after_wait)
        rows = _rows(batch)
        if rows is not None:
            self.samples += rows
            self._knows_samples = True

    def enter(self, region: int) -> None:
        if region == WAIT:
            self._sees_data = True
        self._clock.enter(region)

    def leave(self) -> None:
        self._clock.leave()

    def step(self, *, loss: Any = None, learning_rate: Any = None, samples: int | None = None) -> None:
        """Count a step that has ended."""
        self.begin()
        self.steps += 1
        if samples is not None:
            self.samples += samples
            self._knows_samples = True
        if learning_rate is not None:
            value = _number(learning_rate)
            self._learning_rate = UNKNOWN if value is None else value
        if loss is not None:
            self._note_loss(loss)
        if now() - self._written_at_s >= WRITE_EVERY_S:
            self.write()

    def _note_loss(self, loss: Any) -> None:
        if not getattr(loss, "is_cuda", False):
            self._loss = _number(loss)
        elif self._device is not None:
            self._ask_device(self._device.note_loss, loss)

    def _ask_device(self, question: Callable[..., None], *arguments: Any) -> None:
        """Ask the GPU; if its work failed, swallow the error: the job must meet it itself."""
        try:
            question(*arguments)
        except RuntimeError:
            self._device = None
            self._asks_device = False

    def restart_count(self) -> None:
        """Start counting again: the job says where its steps end, and batches were counted until here."""
        self.is_explicit = True
        self.steps = 0

    def write(self, *, ended: bool = False) -> None:
        if os.getpid() != self._pid:  # a forked child shares the file, but it is not the job
            return
        totals = self._clock.take()
        self._host_s = [old + fresh for old, fresh in zip(self._host_s, totals, strict=False)]
        if self._asks_device and not ended:
            self._ask_device(self._find_device)
        device = self._device
        memory, device_memory, loss = (UNKNOWN, UNKNOWN, UNKNOWN), (UNKNOWN, UNKNOWN), self._loss
        if device is not None:
            memory, device_memory = device.memory, device.device_memory
            loss = device.loss if loss is None else loss
        scalars = [
            time.time(),
            float(self.steps),
            float(self.samples) if self._knows_samples else UNKNOWN,
            float(ended),
            float(self._sees_data),
            UNKNOWN if loss is None else loss,
            self._learning_rate,
            *memory,
            *device_memory,
            float(loss is not None and math.isnan(loss)),
        ]
        if device is None:
            self._writer.write(scalars, self._host_s, _NO_DEVICE)
        else:
            self._writer.write(scalars, self._host_s, device.totals_s, device.gpu_id, device.name)
        self._written_at_s = now()

    def _find_device(self) -> None:
        if self._device is None:
            self._device = device_of_job()
        if self._device is not None:
            self._device.collect()

    def close(self) -> None:
        if os.getpid() == self._pid:
            self.write(ended=True)
            self._writer.close()


def _number(value: Any) -> float | None:
    """Read a number or a host tensor; anything else, such as a GPU tensor, is unknown."""
    device = getattr(value, "device", "cpu")
    if getattr(device, "type", device) != "cpu":
        return None
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _rows(batch: Any) -> int | None:
    """Count the rows of a batch: the first dimension of its first tensor."""
    for _ in range(3):
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else None
        if isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        elif isinstance(batch, (list, tuple)) and batch:
            batch = batch[0]
        else:
            return None
    return None
