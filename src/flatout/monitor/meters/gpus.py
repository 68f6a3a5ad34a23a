"""Every GPU of the machine through NVML, again and again, whatever happens to it.

The driver keeps a short history of utilisation, several values a second: their mean over the time since the
last reading costs one call and misses nothing, where a momentary value misses most.  Every question costs CPU
time, some milliseconds, so histories are read every other second, and what moves slowly (temperature, clocks,
who is on the GPU) every few seconds; figures stand until then.

A GPU can fall off the bus, and a driver can be restarted under a running monitor.  Neither ends it: a lost
GPU has no figures, a reason and a note, and is asked again after 1, 2, 4 … 60 seconds; where no GPU answers,
the connection to NVML is renewed in the same rhythm.  NVML is started once, by the `GpuReader` inside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flatout.hardware.nvml import GpuReader
from flatout.hardware.nvml_questions import (
    INSTANCE_REASON,
    Questions,
    memory_fields,
    read_scaled,
    throttle_reasons,
)
from flatout.hardware.snapshot import GpuSnapshot
from flatout.hardware.visible import GpuIdentity, MigIdentity, select_visible
from flatout.monitor.meters.gpu_counters import METRICS, EnergyMeter, PcieMeter, PerformanceMetrics
from flatout.monitor.meters.processes import processes_of_gpu
from flatout.monitor.sample import GpuSample, ProcessSample

LONGEST_RETRY_S = 60.0
FIRST_LOOK_BACK_S = 1.0
SLOW_EVERY_S = 5.0
HISTORY_EVERY_S = 1.9  # every other sample at 1 Hz: asking takes 2 ms of an H200's host
SLOW_FIGURES = ("temperature_c", "sm_clock_hz", "memory_clock_hz")
FIXED = (  # what does not change
    *("index", "mig_index", "name", "uuid"),
    *("memory_total_bytes", "power_limit_w", "sm_clock_max_hz"),
)


@dataclass(kw_only=True, slots=True)
class _Retry:
    """When to ask again whatever did not answer."""

    at_s: float = 0.0
    wait_s: float = 1.0

    def later(self, now_s: float) -> None:
        self.at_s = now_s + self.wait_s
        self.wait_s = min(self.wait_s * 2, LONGEST_RETRY_S)


class GpuMeter:
    """Reads all GPUs; `rows` are their processes, `notes` what happened, `refusal` why there are none."""

    def __init__(self, nvml: Any = None) -> None:
        self.refusal: str | None = None
        self.notes: list[str] = []
        self.rows: list[ProcessSample] = []
        self._nvml = nvml
        self._reader: GpuReader | None = None
        self._gpus: list[_Gpu] = []
        self._retry = _Retry()
        self._turn = -1

    def read(self, now_s: float, *, time_s: float) -> tuple[GpuSample, ...]:
        """Read all GPUs; `now_s` is monotonic, `time_s` since the epoch, as in the driver's histories."""
        self.rows = []
        if self._reader is None and now_s >= self._retry.at_s:
            self._connect(now_s)
        if self._reader is None:
            return tuple(gpu.unknown(self.refusal or "no connection") for gpu in self._gpus)
        self._turn += 1
        samples = []
        for number, gpu in enumerate(self._gpus):
            # A question about PCIe can take 40 ms: one GPU has its turn at each reading.
            samples.append(gpu.read(now_s, time_s, may_wait=self._turn % len(self._gpus) == number))
            self.rows += gpu.rows
            self.notes += gpu.notes
            gpu.notes.clear()
        if samples and all(
            each.memory_used_bytes is None and each.utilisation_share is None for each in samples
        ):
            self._lose_connection(now_s)
        return tuple(samples)

    def visible(self, value: str | None) -> tuple[int, ...]:
        """Return NVML's numbers of the GPUs that CUDA_VISIBLE_DEVICES=`value` shows, in CUDA's order."""
        instances: dict[int, tuple[MigIdentity, ...]] = {}
        whole: dict[int, str | None] = {}
        for gpu in self._gpus:
            if gpu.fixed.mig_index is None:
                whole[gpu.fixed.index] = gpu.fixed.uuid
            else:
                known = instances.get(gpu.fixed.index, ())
                instances[gpu.fixed.index] = (*known, MigIdentity(uuid=gpu.fixed.uuid))
        identities = [
            GpuIdentity(uuid=uuid, instances=instances.get(index, ())) for index, uuid in whole.items()
        ]
        return tuple(dict.fromkeys(found.gpu for found in select_visible(value, gpus=identities).devices))

    def index_of(self, uuid: str | None) -> int | None:
        """Return NVML's number of the GPU with this id, with or without its prefix."""
        wanted = (uuid or "").removeprefix("GPU-")
        known = ((gpu.fixed.index, (gpu.fixed.uuid or "").removeprefix("GPU-")) for gpu in self._gpus)
        return next((index for index, own in known if wanted and own == wanted), None)

    def close(self) -> None:
        for gpu in self._gpus:
            if gpu.metrics is not None:
                gpu.metrics.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self.refusal = "the meter was closed"
        self._retry.at_s = float("inf")

    def _connect(self, now_s: float) -> None:
        reader = GpuReader(self._nvml, environ={})
        snapshot = reader.snapshot(hidden=True)
        if reader.refusal is not None or not snapshot.gpus:
            self.refusal = reader.refusal or snapshot.missing.get("gpus", "NVML counts no GPU")
            reader.close()
            self._retry.later(now_s)
            return
        if self._gpus:
            self.notes.append("the NVIDIA driver answers again")
        self._reader, self.refusal, self._retry = reader, None, _Retry()
        self._gpus = [
            _Gpu(reader.nvml, part)
            for gpu in snapshot.gpus
            for part in (gpu, *(gpu.instances if gpu.mig_enabled else ()))
        ]

    def _lose_connection(self, now_s: float) -> None:
        assert self._reader is not None
        self.notes.append("no GPU answers; reconnecting to the NVIDIA driver")
        for gpu in self._gpus:
            gpu.metrics = None  # its buffers belong to the driver that is gone
        self._reader.close()
        self._reader, self.refusal = None, "the NVIDIA driver does not answer"
        self._retry.later(now_s)


class _Gpu:
    """One GPU or MIG instance, and where its counters stood."""

    def __init__(self, nvml: Any, part: GpuSnapshot) -> None:
        self.fixed = GpuSample(**{name: getattr(part, name) for name in FIXED})
        self.metrics: PerformanceMetrics | None = None
        self.notes: list[str] = []
        self.rows: tuple[ProcessSample, ...] = ()
        self._nvml = nvml
        self._handle = self._open()
        self._lost = None if self._handle is not None else part.missing.get("name", "NVML does not open it")
        self._retry = _Retry()
        self._pcie, self._energy = PcieMeter(), EnergyMeter()
        self._busy: tuple[float, float] | None = None  # at which second its history was read, and the mean
        self._slow: tuple[float, dict[str, Any], dict[str, str]] | None = (
            None  # when, figures, what is missing
        )
        self._seen_us: dict[str, int] = {}  # how far the driver's histories were read

    def __str__(self) -> str:
        instance = "" if self.fixed.mig_index is None else f" instance {self.fixed.mig_index}"
        return f"GPU {self.fixed.index}{instance}"

    def unknown(self, reason: str) -> GpuSample:
        missing = {"memory_used_bytes": reason, "utilisation_share": reason}
        return replace(self.fixed, lost=True, missing=missing)

    def read(self, now_s: float, time_s: float, *, may_wait: bool) -> GpuSample:
        if self._lost is not None:
            self.rows = ()
            if now_s < self._retry.at_s:
                return self.unknown(self._lost)
            self._handle = self._open()
            if self._handle is None:
                self._retry.later(now_s)
                return self.unknown(self._lost)
        questions = Questions(self._nvml, self._handle)
        sample = self._figures(questions, now_s, time_s, may_wait=may_wait)
        if questions.lost is not None:
            if self._lost is None:
                self.notes.append(f"{self} is lost: {questions.lost}")
            self._lost, self.metrics, self._slow, self._busy = questions.lost, None, None, None
            self._retry.later(now_s)
            return self.unknown(questions.lost)
        if self._lost is not None:
            self.notes.append(f"{self} answers again")
            self._lost, self._retry = None, _Retry()
        return sample

    def _open(self) -> Any:
        handle = Questions(self._nvml).ask((), ("nvmlDeviceGetHandleByIndex", self.fixed.index))
        if handle is None or self.fixed.mig_index is None:
            return handle
        call = ("nvmlDeviceGetMigDeviceHandleByIndex", self.fixed.mig_index)
        return Questions(self._nvml, handle).ask((), call)

    def _figures(self, questions: Questions, now_s: float, time_s: float, *, may_wait: bool) -> GpuSample:
        figures: dict[str, Any] = {"memory_used_bytes": memory_fields(questions).get("memory_used_bytes")}
        if figures["memory_used_bytes"] is None:
            self._busy = None  # whether it answers at all is to be seen at once
        if self.fixed.mig_index is not None:
            questions.missing.update(dict.fromkeys(("utilisation_share", "power_w"), INSTANCE_REASON))
        else:
            if self.metrics is None:
                self.metrics = PerformanceMetrics(questions)
            metrics = self.metrics.read(questions, now_s)
            if self.metrics.reason is not None:
                questions.missing.update(dict.fromkeys(METRICS, self.metrics.reason))
            figures["utilisation_share"] = self._utilisation(questions, now_s, time_s)
            figures |= self._pcie.read(questions, now_s, may_wait=may_wait, known=metrics)
            figures |= metrics
            figures |= self._energy.read(questions, now_s)
        if self._slow is None or now_s - self._slow[0] >= SLOW_EVERY_S:
            self._slow = (now_s, *self._ask_slow(questions, time_s))
        _, slow, missing = self._slow
        return replace(self.fixed, **figures, **slow, missing={**missing, **questions.missing})

    def _ask_slow(self, questions: Questions, time_s: float) -> tuple[dict[str, Any], dict[str, str]]:
        """Ask what is asked every few seconds, and for processes; return figures and what is missing."""
        known = set(questions.missing)
        figures: dict[str, Any] = {}
        if self.fixed.mig_index is None:
            figures = {name: read_scaled(questions, name) for name in SLOW_FIGURES}
            figures["throttle_reasons"] = throttle_reasons(questions)
        since_us = self._since("processes", time_s)
        self._seen_us["processes"] = int(time_s * 1e6)
        found = processes_of_gpu(questions, self.fixed.index, self.fixed.mig_index, since_us=since_us)
        self.rows = tuple(found)
        return figures, {name: why for name, why in questions.missing.items() if name not in known}

    def _utilisation(self, questions: Questions, now_s: float, time_s: float) -> float | None:
        """Average the driver's history, or take the momentary value if there is none."""
        if self._busy is None or now_s - self._busy[0] >= HISTORY_EVERY_S:
            mean = self._history_mean(questions, time_s)
            self._busy = None if mean is None else (now_s, mean)
        if self._busy is not None:
            return self._busy[1] / 100
        rates = questions.ask(("utilisation_share",), ("nvmlDeviceGetUtilizationRates",))
        return None if rates is None else rates.gpu / 100

    def _history_mean(self, questions: Questions, time_s: float) -> float | None:
        """Return the mean of the driver's values since the last reading; None if there is none."""
        since_us = self._since("utilisation", time_s)
        kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
        answer = questions.ask((), ("nvmlDeviceGetSamples", kind, since_us))
        fresh = [value for value in (answer[1] if answer else ()) if value.timeStamp > since_us]
        if not fresh:
            return None
        self._seen_us["utilisation"] = max(value.timeStamp for value in fresh)
        return sum(float(value.sampleValue.uiVal) for value in fresh) / len(fresh)

    def _since(self, history: str, time_s: float) -> int:
        return self._seen_us.get(history, int((time_s - FIRST_LOOK_BACK_S) * 1e6))
