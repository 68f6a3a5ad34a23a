"""Every GPU of the machine through NVML, again and again, whatever happens to it.

The driver keeps a short history of utilisation, several values a second: their mean over the time since the
last reading costs one call and misses nothing, where a momentary value misses most.  Every question costs CPU
time, some milliseconds, so histories are read every other second, and what moves slowly (temperature, clocks,
who is on the GPU) every few seconds; figures stand until then.

A GPU can fall off the bus, and a driver can be restarted under a running monitor.  Neither ends it: a lost
GPU has no figures, a reason and a note, and is asked again after 1, 2, 4 … 60 seconds; where no GPU answers,
the connection to NVML is made anew in the same rhythm.  NVML is started once, by the `GpuReader` inside.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.hardware.nvml import GpuReader
from flatout.hardware.nvml_questions import INSTANCE_REASON, Questions, memory_fields, throttle_reasons
from flatout.hardware.snapshot import GpuSnapshot
from flatout.hardware.visible import GpuIdentity, MigIdentity, select_visible
from flatout.monitor.meters.energy import JouleMeter
from flatout.monitor.meters.gpm import METRICS, PerformanceMetrics
from flatout.monitor.meters.pcie import PcieMeter
from flatout.monitor.meters.processes import GpuRow, rows_of
from flatout.monitor.sample import GpuSample

LONGEST_RETRY_S = 60.0
FIRST_LOOK_BACK_S = 1.0
SLOW_EVERY_S = 5.0
HISTORY_EVERY_S = 1.9  # every other sample at 1 Hz: asking takes 2 ms of an H200's host
NO_BINDINGS = "the package nvidia-ml-py is not installed"


@dataclass(kw_only=True, slots=True)
class Retry:
    """When to ask again whom did not answer."""

    at_s: float = 0.0
    wait_s: float = 1.0

    def later(self, now_s: float) -> None:
        self.at_s = now_s + self.wait_s
        self.wait_s = min(self.wait_s * 2, LONGEST_RETRY_S)


@dataclass(kw_only=True, slots=True)
class _Watched:
    """A GPU or a MIG instance, and where its counters stood."""

    index: int
    mig_index: int | None
    handle: Any
    fixed: GpuSample  # what does not change: name, total, limits
    metrics: PerformanceMetrics | None = None
    pcie: PcieMeter = field(default_factory=PcieMeter)
    seen_us: dict[str, int] = field(default_factory=dict)
    joules: JouleMeter = field(default_factory=JouleMeter)
    busy: tuple[float, float] | None = None  # at which second its history was read, and the mean
    slow: _Slow | None = None
    lost: str | None = None
    retry: Retry = field(default_factory=Retry)

    def __str__(self) -> str:
        instance = "" if self.mig_index is None else f" instance {self.mig_index}"
        return f"GPU {self.index}{instance}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slow:
    """What is asked every few seconds."""

    at_s: float
    figures: dict[str, Any]
    missing: dict[str, str]
    rows: tuple[GpuRow, ...]


class GpuMeter:
    """Reads all GPUs; `rows` are their processes, `notes` what happened, `refusal` why there are none."""

    def __init__(self, nvml: Any = None) -> None:
        self.refusal: str | None = None
        self.notes: list[str] = []
        self.rows: list[GpuRow] = []
        self._nvml = nvml
        self._reader: GpuReader | None = None
        self._watched: list[_Watched] = []
        self._retry = Retry()
        self._turn = 0
        if nvml is None:
            try:
                self._nvml = importlib.import_module("pynvml")
            except ModuleNotFoundError:
                self.refusal = NO_BINDINGS
                self._retry.at_s = float("inf")

    def read(self, now_s: float, *, time_s: float) -> tuple[GpuSample, ...]:
        """`now_s` is of a clock that does not jump, `time_s` since the epoch, as the driver's histories."""
        self.rows = []
        if self._reader is None and now_s >= self._retry.at_s:
            self._connect(now_s)
        if self._reader is None:
            return tuple(_unknown(gpu, self.refusal or "no connection") for gpu in self._watched)
        self._turn += 1
        samples = tuple(self._read_one(gpu, now_s, time_s) for gpu in self._watched)
        if samples and all(_is_silent(sample) for sample in samples):
            self._lose_connection(now_s)
        return samples

    def visible(self, value: str | None) -> tuple[int, ...]:
        """NVML's numbers of the GPUs that CUDA_VISIBLE_DEVICES=`value` shows, in CUDA's order."""
        whole = [gpu for gpu in self._watched if gpu.mig_index is None]
        identities = [
            GpuIdentity(
                uuid=gpu.fixed.uuid,
                instances=tuple(
                    MigIdentity(uuid=part.fixed.uuid)
                    for part in self._watched
                    if part.index == gpu.index and part.mig_index is not None
                ),
            )
            for gpu in whole
        ]
        places = select_visible(value, gpus=identities).devices
        return tuple(dict.fromkeys(place.gpu for place in places))

    def index_of(self, uuid: str | None) -> int | None:
        """NVML's number of the GPU with this id, with or without its prefix."""
        if not uuid:
            return None
        wanted = uuid.removeprefix("GPU-")
        return next(
            (gpu.index for gpu in self._watched if (gpu.fixed.uuid or "").removeprefix("GPU-") == wanted),
            None,
        )

    def close(self) -> None:
        for gpu in self._watched:
            if gpu.metrics is not None:
                gpu.metrics.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self.refusal = "the meter was closed"
        self._retry.at_s = float("inf")

    # The connection

    def _connect(self, now_s: float) -> None:
        reader = GpuReader(self._nvml, environ={})
        snapshot = reader.snapshot(hidden=True)
        if reader.refusal is not None or not snapshot.gpus:
            reason = reader.refusal or snapshot.missing.get("gpus", "NVML counts no GPU")
            reader.close()
            self.refusal = reason
            self._retry.later(now_s)
            return
        if self._watched:
            self.notes.append("the NVIDIA driver answers again")
        self._reader, self.refusal, self._retry = reader, None, Retry()
        self._watched = [
            _watched(self._nvml, part)
            for gpu in snapshot.gpus
            for part in (gpu, *(gpu.instances if gpu.mig_enabled else ()))
        ]

    def _lose_connection(self, now_s: float) -> None:
        assert self._reader is not None
        self.notes.append("no GPU answers: the connection to the NVIDIA driver will be made again")
        for gpu in self._watched:
            gpu.metrics = None  # its buffers belong to the driver that is gone
        self._reader.close()
        self._reader, self.refusal = None, "the NVIDIA driver does not answer"
        self._retry.later(now_s)

    # One GPU

    def _read_one(self, gpu: _Watched, now_s: float, time_s: float) -> GpuSample:
        if gpu.lost is not None:
            if now_s < gpu.retry.at_s:
                return _unknown(gpu, gpu.lost)
            gpu.handle = _handle(self._nvml, gpu.index, gpu.mig_index)
            if gpu.handle is None:
                gpu.retry.later(now_s)
                return _unknown(gpu, gpu.lost)
        questions = Questions(self._nvml, gpu.handle)
        sample = self._figures(gpu, questions, now_s, time_s)
        if questions.lost is not None:
            if gpu.lost is None:
                self.notes.append(f"{gpu} is lost: {questions.lost}")
            gpu.lost, gpu.metrics, gpu.slow, gpu.busy = questions.lost, None, None, None
            gpu.retry.later(now_s)
            return _unknown(gpu, questions.lost)
        if gpu.lost is not None:
            self.notes.append(f"{gpu} answers again")
            gpu.lost, gpu.retry = None, Retry()
        return sample

    def _figures(self, gpu: _Watched, questions: Questions, now_s: float, time_s: float) -> GpuSample:
        memory = memory_fields(questions)
        figures: dict[str, Any] = {"memory_used_bytes": memory.get("memory_used_bytes")}
        if figures["memory_used_bytes"] is None:
            gpu.busy = None  # whether it answers at all is to be seen at once
        if gpu.mig_index is None:
            figures |= self._whole_gpu_figures(gpu, questions, now_s, time_s)
        else:
            questions.missing.update(dict.fromkeys(("utilisation_share", "power_w"), INSTANCE_REASON))
        if gpu.slow is None or now_s - gpu.slow.at_s >= SLOW_EVERY_S:
            gpu.slow = self._ask_slow(gpu, questions, now_s, time_s)
        self.rows += gpu.slow.rows
        missing = {**gpu.slow.missing, **questions.missing}
        return replace(gpu.fixed, **figures, **gpu.slow.figures, missing=missing)

    def _whole_gpu_figures(
        self, gpu: _Watched, questions: Questions, now_s: float, time_s: float
    ) -> dict[str, Any]:
        nvml = self._nvml
        if gpu.metrics is None:
            gpu.metrics = PerformanceMetrics(nvml, questions)
        metrics = gpu.metrics.read(questions, now_s)
        if gpu.metrics.reason is not None:
            questions.missing.update(dict.fromkeys(METRICS, gpu.metrics.reason))
        # A question about PCIe can take 40 ms: one GPU has its turn at each reading.
        mine = (self._turn - 1) % len(self._watched) == self._watched.index(gpu)
        busy = self._busy(gpu, questions, now_s, time_s)
        return {
            **gpu.pcie.read(questions, now_s, may_wait=mine, known=metrics),
            **metrics,
            "utilisation_share": None if busy is None else busy / 100,
            **gpu.joules.read(questions, now_s),
        }

    def _ask_slow(self, gpu: _Watched, questions: Questions, now_s: float, time_s: float) -> _Slow:
        known = dict(questions.missing)
        figures: dict[str, Any] = {}
        if gpu.mig_index is None:
            nvml, clock = self._nvml, "nvmlDeviceGetClockInfo"
            sensor = nvml.NVML_TEMPERATURE_GPU
            readings = (("nvmlDeviceGetTemperatureV", sensor), ("nvmlDeviceGetTemperature", sensor))
            figures = {
                "temperature_c": _scaled(questions, "temperature_c", 1.0, *readings),
                "sm_clock_hz": _scaled(questions, "sm_clock_hz", 1e6, (clock, nvml.NVML_CLOCK_SM)),
                "memory_clock_hz": _scaled(questions, "memory_clock_hz", 1e6, (clock, nvml.NVML_CLOCK_MEM)),
                "throttle_reasons": throttle_reasons(questions),
            }
        since_us = self._since(gpu, "rows", time_s)
        rows = tuple(rows_of(questions, gpu.index, gpu.mig_index, since_us=since_us))
        missing = {name: why for name, why in questions.missing.items() if name not in known}
        return _Slow(at_s=now_s, figures=figures, missing=missing, rows=rows)

    def _busy(self, gpu: _Watched, questions: Questions, now_s: float, time_s: float) -> float | None:
        """Per cent of the time; from the driver's history, or the momentary value where it has none."""
        if gpu.busy is None or now_s - gpu.busy[0] >= HISTORY_EVERY_S:
            mean = self._history_mean(gpu, questions, "NVML_GPU_UTILIZATION_SAMPLES", time_s)
            gpu.busy = None if mean is None else (now_s, mean)
        if gpu.busy is not None:
            return gpu.busy[1]
        rates = questions.ask(("utilisation_share",), ("nvmlDeviceGetUtilizationRates",))
        return None if rates is None else float(rates.gpu)

    def _history_mean(self, gpu: _Watched, questions: Questions, kind: str, time_s: float) -> float | None:
        """The mean of the driver's own values since the last reading; None where it has none."""
        since_us = self._since(gpu, kind, time_s)
        answer = questions.ask((), ("nvmlDeviceGetSamples", getattr(self._nvml, kind), since_us))
        fresh = [value for value in (answer[1] if answer else ()) if value.timeStamp > since_us]
        if not fresh:
            return None
        gpu.seen_us[kind] = max(value.timeStamp for value in fresh)
        return sum(float(value.sampleValue.uiVal) for value in fresh) / len(fresh)

    def _since(self, gpu: _Watched, kind: str, time_s: float) -> int:
        since_us = gpu.seen_us.get(kind, int((time_s - FIRST_LOOK_BACK_S) * 1e6))
        if kind == "rows":
            gpu.seen_us[kind] = int(time_s * 1e6)
        return since_us


def _scaled(questions: Questions, name: str, scale: float, *calls: tuple[Any, ...]) -> float | None:
    value = questions.ask((name,), *calls)
    return None if value is None else float(value * scale)


def _watched(nvml: Any, part: GpuSnapshot) -> _Watched:
    fixed = GpuSample(
        index=part.index,
        mig_index=part.mig_index,
        name=part.name,
        uuid=part.uuid,
        memory_total_bytes=part.memory_total_bytes,
        power_limit_w=part.power_limit_w,
        sm_clock_max_hz=part.sm_clock_max_hz,
    )
    handle = _handle(nvml, part.index, part.mig_index)
    lost = None if handle is not None else part.missing.get("name", "NVML does not open it")
    return _Watched(index=part.index, mig_index=part.mig_index, handle=handle, fixed=fixed, lost=lost)


def _handle(nvml: Any, index: int, mig_index: int | None) -> Any:
    handle = Questions(nvml).ask((), ("nvmlDeviceGetHandleByIndex", index))
    if handle is None or mig_index is None:
        return handle
    return Questions(nvml, handle).ask((), ("nvmlDeviceGetMigDeviceHandleByIndex", mig_index))


def _unknown(gpu: _Watched, reason: str) -> GpuSample:
    return replace(gpu.fixed, lost=True, missing={"memory_used_bytes": reason, "utilisation_share": reason})


def _is_silent(sample: GpuSample) -> bool:
    return sample.memory_used_bytes is None and sample.utilisation_share is None
