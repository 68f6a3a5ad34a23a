"""A Sample: everything known of a machine and its job at one moment, or over one span of time.

Views, verdicts, logs and sinks read Samples and nothing else.  Unknown is None, with the reason under the
field's name in `missing`.  Two figures are easily misread.  `utilisation_share` is the share of time in
which some kernel ran, however small: at 100 % a GPU may still do a tenth of its work.  `sm_active_share`
(Hopper and later) is the share of its processors that were busy, averaged over time; prefer it.

`merge` makes one sample of many: a minute of a log, an hour, or the window a verdict looks at.  A float
becomes its mean, anything else its last value; fields that differ say so in their metadata.  Means are over
time and over the samples that knew the value: a GPU that was lost for half a minute has the mean of the other
half, not half the mean.  The lowest and the highest of what charts show are kept beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from flatout.ground.codec import encode
from flatout.ground.documents import DocumentKind, decode_document
from flatout.ground.units import UNKNOWN

SAMPLE = DocumentKind(
    format="flatout-sample", version=1, what="a Sample", hint="flatout watch --json prints them"
)
ABOUT = {"format": SAMPLE.format, "version": SAMPLE.version}

# How samples merge if neither "mean of floats" nor "last of the rest" is right.
PEAK = {"merge": "peak"}  # what matters of memory is the most of it
LAST = {"merge": "last"}  # counters and limits
EVERY = {"merge": "every"}  # each distinct text once

EMPTY_BY_DEFAULT = ("gpus", "processes", "notes")
MOST_NOTES = 16
UNWEIGHTED_S = 1.0  # a first sample has no span
# What charts show over time
HOST_FIGURES = ("cpu_share", "memory_used_bytes")
JOB_FIGURES = ("steps_per_s", "loss", "allocated_bytes", "reserved_bytes")
GPU_FIGURES = ("utilisation_share", "sm_active_share", "memory_used_bytes", "power_w")

Row = TypeVar("Row")

JobState = Literal["running", "stopped", "ended", "died"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSample:
    """The host, as far as the job may use it: a container's limits count, not the machine's."""

    cpu_share: float | None = None  # of a container's quota if there is one, else of the whole machine
    cores: float | None = field(default=None, metadata=LAST)
    memory_used_bytes: int | None = field(default=None, metadata=PEAK)
    memory_total_bytes: int | None = None
    memory_limited_by: str | None = None  # "the machine" or "the control group"
    shm_free_bytes: int | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    network_received_bytes_per_s: float | None = None
    network_sent_bytes_per_s: float | None = None
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """One GPU, or one MIG instance of it."""

    index: int  # NVML's number
    mig_index: int | None = None
    name: str | None = None
    uuid: str | None = None
    utilisation_share: float | None = None  # of the time, some kernel ran: not how much of the GPU it used
    sm_active_share: float | None = None
    sm_occupancy_share: float | None = None
    tensor_active_share: float | None = None
    memory_bandwidth_share: float | None = None
    memory_used_bytes: int | None = field(default=None, metadata=PEAK)
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = field(default=None, metadata=LAST)
    energy_j: float | None = field(default=None, metadata=LAST)  # since the driver was loaded
    temperature_c: float | None = field(default=None, metadata=PEAK)
    sm_clock_hz: float | None = None
    sm_clock_max_hz: float | None = field(default=None, metadata=LAST)
    memory_clock_hz: float | None = None
    throttle_reasons: tuple[str, ...] | None = field(default=None, metadata=EVERY)
    pcie_received_bytes_per_s: float | None = None
    pcie_sent_bytes_per_s: float | None = None
    lost: bool = False  # it does not answer; None of its figures is a zero
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int | None]:
        return self.index, self.mig_index

    @property
    def label(self) -> str:
        """0, or 0.1 for instance 1 of GPU 0."""
        return str(self.index) if self.mig_index is None else f"{self.index}.{self.mig_index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSample:
    """One process on one GPU, or a process of the job that uses none."""

    pid: int
    gpu_index: int | None = None
    mig_index: int | None = None
    name: str | None = None
    of_job: bool = False
    gpu_memory_bytes: int | None = field(default=None, metadata=PEAK)
    sm_share: float | None = None
    cpu_cores: float | None = None  # 1.0: one core, all the time
    memory_bytes: int | None = field(default=None, metadata=PEAK)

    @property
    def key(self) -> tuple[int, int | None, int | None]:
        return self.pid, self.gpu_index, self.mig_index


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSample:
    """What a job reports of itself; its rates and shares are those of the sample's span.

    `phases` are shares of the host's time, `device_phases` of the GPU's: a GPU that still computes while
    the host waits for a batch is not starved, and only the second shows it.  Keys are those of
    `measure.evidence.PHASES`.
    """

    pid: int
    name: str | None = None
    state: JobState = "running"
    rank: int | None = None
    world_size: int | None = None
    steps: int | None = None
    samples: int | None = None  # rows of all batches so far
    step_s: float | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    since_step_s: float | None = field(default=None, metadata=LAST)
    phases: dict[str, float] | None = None
    device_phases: dict[str, float] | None = None
    loss: float | None = field(default=None, metadata=LAST)
    loss_is_finite: bool | None = None  # False: it is NaN or infinite, for which JSON has no number
    learning_rate: float | None = field(default=None, metadata=LAST)
    allocated_bytes: int | None = field(default=None, metadata=PEAK)
    reserved_bytes: int | None = field(default=None, metadata=PEAK)
    peak_allocated_bytes: int | None = field(default=None, metadata=PEAK)
    gpu_index: int | None = None  # NVML's number of the GPU it computes on
    visible_gpus: tuple[int, ...] | None = None  # NVML's numbers of the GPUs that it could use
    energy_per_step_j: float | None = None
    energy_per_sample_j: float | None = None
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def has_bad_loss(self) -> bool:
        """Whether the loss is NaN or infinite."""
        return self.loss_is_finite is False or (self.loss is not None and not math.isfinite(self.loss))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A machine and its job, at `time_s` for the `span_s` before it."""

    time_s: float  # seconds since the epoch
    span_s: float | None = None  # None: the first sample, which stands for an instant
    host: HostSample = field(default_factory=HostSample)
    gpus: tuple[GpuSample, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
    job: JobSample | None = None
    notes: tuple[str, ...] = field(default=(), metadata=EVERY)  # what happened: a gap, a GPU lost or back
    missing: dict[str, str] = field(default_factory=dict)
    low: dict[str, float] = field(default_factory=dict, metadata=LAST)  # of many samples, by path
    high: dict[str, float] = field(default_factory=dict, metadata=LAST)

    @property
    def start_s(self) -> float:
        """When the period it covers began."""
        return self.time_s - (self.span_s or 0.0)

    def gpu(self, index: int | None) -> GpuSample | None:
        """Return the whole GPU that NVML numbers `index`."""
        return next((gpu for gpu in self.gpus if gpu.index == index and gpu.mig_index is None), None)

    @property
    def job_gpu(self) -> GpuSample | None:
        """Return the GPU the job computes on; if the job does not say which, the only candidate."""
        if self.job is not None and self.job.gpu_index is not None:
            return self.gpu(self.job.gpu_index)
        visible = self.job.visible_gpus if self.job is not None else None
        able = [gpu for gpu in self.gpus if visible is None or gpu.index in visible]
        return able[0] if len(able) == 1 else None

    def to_json(self) -> dict[str, Any]:
        """Return the whole document, with null for unknown values."""
        data = encode(self)
        if self.job is not None and self.job.has_bad_loss:
            data["job"] |= {"loss": None, "loss_is_finite": False}
        return {**ABOUT, **data}

    @classmethod
    def from_json(cls, data: Any) -> Sample:
        """Read what `to_json` or `lean` wrote; raise BadInput for anything else."""
        whole = {**ABOUT, **data} if isinstance(data, dict) else data
        return decode_document(whole, cls, SAMPLE, name="this")


def lean(value: Any) -> Any:
    """Drop unknown and empty values from plain JSON: it halves a log of samples."""
    if isinstance(value, dict):
        return {
            key: lean(item)
            for key, item in value.items()
            # An empty list is a default for these alone: no throttle reason is not an unknown one.
            if item is not None and item != {} and not (item == [] and key in EMPTY_BY_DEFAULT)
        }
    return [lean(item) for item in value] if isinstance(value, list) else value


def show_loss(loss: float | None) -> str:
    """Show a loss; NaN and infinity by name."""
    if loss is None:
        return UNKNOWN
    return f"{loss:.4g}" if math.isfinite(loss) else "NaN" if math.isnan(loss) else "infinite"


# Windows of time


def last_seconds(samples: Sequence[Sample], span_s: float) -> tuple[Sample, ...]:
    """Return the samples of the last `span_s` seconds."""
    return tuple(sample for sample in samples if samples[-1].time_s - sample.time_s <= span_s)


def drop_older(window: deque[Sample], span_s: float) -> None:
    """Drop samples from a window until it covers at most `span_s` seconds."""
    while window and window[-1].time_s - window[0].time_s > span_s:
        window.popleft()


# Many samples as one


def merge(samples: Sequence[Sample]) -> Sample:
    """Merge samples, at least one, in order of time."""
    if len(samples) == 1:
        return samples[0]
    first, last = samples[0], samples[-1]
    merged = _merge_values(samples, [sample.span_s or UNWEIGHTED_S for sample in samples])
    span_s = last.time_s - first.time_s + (first.span_s or 0.0)
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for sample in samples:
        for path, value in charted_figures(sample):
            low[path] = min(low.get(path, math.inf), sample.low.get(path, value))
            high[path] = max(high.get(path, -math.inf), sample.high.get(path, value))
    notes = merged.notes[-MOST_NOTES:]
    return dataclasses.replace(merged, time_s=last.time_s, span_s=span_s, notes=notes, low=low, high=high)


def charted_figures(sample: Sample) -> Iterator[tuple[str, float]]:
    """Yield the known figures that charts show, by path: gpu/0/power_w."""
    groups: list[tuple[str, Any, tuple[str, ...]]] = [("host", sample.host, HOST_FIGURES)]
    groups += [(f"gpu/{gpu.label}", gpu, GPU_FIGURES) for gpu in sample.gpus]
    if sample.job is not None:
        groups.append(("job", sample.job, JOB_FIGURES))
    for group, row, names in groups:
        for name in names:
            value = getattr(row, name)
            if value is not None and math.isfinite(value):
                yield f"{group}/{name}", value


@functools.cache
def _plan(shape: type) -> tuple[tuple[str, str], ...]:
    """Return (field, rule) for each field of a dataclass."""
    hints = typing.get_type_hints(shape)
    return tuple(
        (field.name, field.metadata.get("merge") or _rule_of(hints[field.name]))
        for field in dataclasses.fields(shape)
    )


def _rule_of(hint: Any) -> str:
    kinds = typing.get_args(hint) if typing.get_origin(hint) is not tuple else ()
    kinds = kinds or (hint,)
    if float in kinds:
        return "mean"
    if any(typing.get_args(kind) == (str, float) for kind in kinds):
        return "means"
    if any(dataclasses.is_dataclass(kind) for kind in kinds):
        return "nested"
    if typing.get_origin(hint) is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0]):
        return "rows"
    return "last"


def _merge_values(values: Sequence[Row], weights: Sequence[float]) -> Row:
    shape: Any = type(values[0])
    return typing.cast(
        Row,
        shape(
            **{
                name: _RULES[rule]([getattr(value, name) for value in values], weights)
                for name, rule in _plan(shape)
            }
        ),
    )


def _known(values: Sequence[Any], weights: Sequence[float]) -> list[tuple[Any, float]]:
    return [pair for pair in zip(values, weights, strict=True) if pair[0] is not None]


def _mean(values: Sequence[Any], weights: Sequence[float]) -> float | None:
    known = _known(values, weights)
    return sum(value * weight for value, weight in known) / sum(w for _, w in known) if known else None


def _means(values: Sequence[Any], weights: Sequence[float]) -> dict[str, float] | None:
    known = _known(values, weights)
    if not known:
        return None
    total = sum(weight for _, weight in known)
    names = dict.fromkeys(name for value, _ in known for name in value)
    return {name: sum(value.get(name, 0.0) * weight for value, weight in known) / total for name in names}


def _last(values: Sequence[Any], weights: Sequence[float]) -> Any:
    return next((value for value in reversed(values) if value is not None), None)


def _peak(values: Sequence[Any], weights: Sequence[float]) -> Any:
    return max((value for value, _ in _known(values, weights)), default=None)


def _every(values: Sequence[Any], weights: Sequence[float]) -> tuple[str, ...] | None:
    known = _known(values, weights)
    return tuple(dict.fromkeys(text for value, _ in known for text in value)) if known else None


def _nested(values: Sequence[Any], weights: Sequence[float]) -> Any:
    known = _known(values, weights)
    return _merge_values([value for value, _ in known], [weight for _, weight in known]) if known else None


def _rows(values: Sequence[Any], weights: Sequence[float]) -> tuple[Any, ...]:
    """Merge rows with the same key, in the order of their first appearance."""
    by_key: dict[Any, tuple[list[Any], list[float]]] = {}
    for rows, weight in zip(values, weights, strict=True):
        for row in rows:
            found, weights_of_row = by_key.setdefault(row.key, ([], []))
            found.append(row)
            weights_of_row.append(weight)
    return tuple(_merge_values(rows, weights_of_row) for rows, weights_of_row in by_key.values())


_RULES = {
    "mean": _mean,
    "means": _means,
    "last": _last,
    "peak": _peak,
    "every": _every,
    "nested": _nested,
    "rows": _rows,
}
