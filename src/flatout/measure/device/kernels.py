"""The device's side of a step, recorded by torch's profiler.

A GPU is busy while at least one kernel runs on any of its streams; copies run on engines of their own and do
not count.  The rest of the step is gap: the host had nothing queued.  A gap that begins when the host returns
from a wait for the GPU (`loss.item()`, a copy from pageable memory) is the price of that wait: the queue ran
dry and refills only afterwards.  Later gaps count too, up to the length of the wait: without it the host
would have issued every later launch that much earlier.

Without a GPU, operators answer the same questions.  `BackwardCosts` answers another one: which part of the
backward pass a line of the forward pass is responsible for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.measure.device.kernel_names import copy_kind, kernel_category, kernel_dtype, optimizer_kind
from flatout.measure.device.operators import (
    NUM_TOP,
    operator_rows,
    summarise_operators,
    with_communication,
)
from flatout.measure.device.overlap import communication, merge_intervals
from flatout.measure.device.recording import Recording
from flatout.measure.evidence import Copy, Kernel, Kernels

Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

_WAITS = frozenset(
    (
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventSynchronize",
        "hipStreamSynchronize",
        "hipDeviceSynchronize",
        "hipEventSynchronize",
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Events of one sort in columns; `code` indexes `names`."""

    names: tuple[str, ...]
    code: Longs
    start_ns: Longs
    end_ns: Longs
    correlation: Longs  # equal for a kernel and the call that launched it
    num_bytes: Longs  # of copies; -1 if the profiler does not say

    def __len__(self) -> int:
        return len(self.code)

    def only(self, mask: npt.NDArray[np.bool_]) -> Timeline:
        return Timeline(
            names=self.names,
            code=self.code[mask],
            start_ns=self.start_ns[mask],
            end_ns=self.end_ns[mask],
            correlation=self.correlation[mask],
            num_bytes=self.num_bytes[mask],
        )

    def named(self, belongs: Any) -> npt.NDArray[np.bool_]:
        """Return a mask of the events whose name satisfies `belongs(name)`."""
        per_name = np.array([bool(belongs(name)) for name in self.names], dtype=bool)
        return per_name[self.code] if len(self.names) else np.zeros(0, dtype=bool)


def timeline(rows: Sequence[tuple[str, int, int, int, int]]) -> Timeline:
    """Turn (name, start, end, correlation, bytes) rows into columns, ordered by start."""
    codes: dict[str, int] = {}
    table = np.array(
        [(codes.setdefault(row[0], len(codes)), *row[1:]) for row in rows], dtype=np.int64
    ).reshape(-1, 5)
    table = table[np.argsort(table[:, 1], kind="stable")]
    return Timeline(
        names=tuple(codes),
        code=table[:, 0],
        start_ns=table[:, 1],
        end_ns=table[:, 2],
        correlation=table[:, 3],
        num_bytes=table[:, 4],
    )


class KernelRecorder:
    """Records the kernels of a few steps (operators, without a GPU)."""

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._recording = Recording(cpu=not self._cuda, cuda=self._cuda)

    def start(self) -> None:
        self._recording.start()

    def stop(self, num_steps: int, step_s: float, *, has_optimizer: bool = True) -> Kernels:
        """Return what ran since `start`, in `num_steps` steps of `step_s` seconds each.

        `has_optimizer` says that an optimizer stepped among them: kernels alone cannot tell a loop over
        parameters from no optimizer at all.
        """
        events = self._recording.stop()
        if num_steps < 1:
            raise RuntimeError("no step ended while kernels were recorded")
        if not self._cuda:
            found = summarise_operators(operator_rows(events), num_steps=num_steps, step_s=step_s)
            return with_communication(found, events)
        device, host = device_timelines(events)
        in_steps = (host.start_ns >= self._recording.start_ns) & (host.start_ns < self._recording.stop_ns)
        return summarise_device(
            device,
            host.only(in_steps),
            window_ns=self._recording.end_ns - self._recording.start_ns,
            num_steps=num_steps,
            step_s=step_s,
            has_optimizer=has_optimizer,
        )


def device_timelines(events: Sequence[Any]) -> tuple[Timeline, Timeline]:
    """Return what ran on the GPU, and the CUDA runtime calls that requested it."""
    from torch._C._autograd import DeviceType

    device: list[tuple[str, int, int, int, int]] = []
    host: list[tuple[str, int, int, int, int]] = []
    for event in events:
        name, start_ns = event.name(), event.start_ns()
        row = (name, start_ns, start_ns + event.duration_ns(), event.correlation_id(), -1)
        if event.device_type() == DeviceType.CUDA:
            if name.endswith(" Sync") or name == "Stream Wait Event":
                continue
            device.append((*row[:4], _copied_bytes(event)) if name.startswith("Memcpy") else row)
        elif name.startswith(("cu", "hip")):
            host.append(row)
    return timeline(device), timeline(host)


def _copied_bytes(event: Any) -> int:
    """Return the size of a copy, if the recording asked for the tracer's metadata."""
    match = re.search(r'"bytes":\s*"?(\d+)', event.metadata_json())
    return int(match[1]) if match else -1


def summarise_device(
    device: Timeline,
    host: Timeline,
    *,
    window_ns: int,
    num_steps: int,
    step_s: float,
    has_optimizer: bool,
) -> Kernels:
    """Summarise the kernels of a recording that lasted `window_ns`.

    A host that runs ahead has issued all its steps before the GPU has run them: a step takes as long as the
    slower of the two.
    """
    engine = device.named(lambda name: name.startswith(("Memcpy", "Memset")))
    kernels, copies = device.only(~engine), device.only(device.named(lambda name: name.startswith("Memcpy")))
    starts, ends = merge_intervals(kernels.start_ns, kernels.end_ns)
    busy_ns = int((ends - starts).sum())
    waits = host_waits(host, copies)
    by_category, by_dtype = _seconds_by_kind(device, num_steps=num_steps)
    kind = optimizer_kind(kernels.names) if has_optimizer else None
    collective = kernels.named(lambda name: kernel_category(name) == "communication")
    spans = np.stack((kernels.start_ns, kernels.end_ns), axis=1)
    exchange = communication(spans[collective], spans[~collective])
    return Kernels(
        num_steps=num_steps,
        step_s=max(step_s, window_ns / 1e9 / num_steps),
        busy_share=min(1.0, busy_ns / window_ns) if window_ns > 0 else None,
        num_kernels=len(kernels) / num_steps,
        median_kernel_s=float(np.median(kernels.end_ns - kernels.start_ns)) / 1e9 if len(kernels) else None,
        gap_s=max(0, window_ns - busy_ns) / 1e9 / num_steps,
        sync_gap_s=idle_after(waits, starts, ends) / 1e9 / num_steps,
        num_syncs=len(waits) / num_steps,
        by_category_s=by_category,
        matmul_s_by_dtype=by_dtype,
        top=_top(device, num_steps=num_steps),
        copies=_copies(copies, num_steps=num_steps),
        optimizer=kind or ("for-loop" if has_optimizer and len(kernels) else None),
        communication_s=None if exchange is None else exchange[0] / 1e9 / num_steps,
        exposed_s=None if exchange is None else exchange[1] / 1e9 / num_steps,
    )


def host_waits(host: Timeline, copies: Timeline) -> Longs:
    """Return when each wait of the host for the GPU began and ended, ordered by end.

    A copy to or from pageable memory blocks the host like a synchronisation; PyTorch mostly adds one
    right after it, and the two are one wait.
    """
    explicit = host.named(lambda name: name in _WAITS)
    pageable = copies.only(copies.named(lambda name: "Pageable" in name)).correlation
    blocking = np.isin(host.correlation, pageable) & host.named(lambda name: "emcpy" in name) & ~explicit
    followed = np.concatenate((explicit[1:], [False])) if len(host) else explicit
    began_ns = host.start_ns.copy()
    began_ns[1:] = np.where(explicit[1:] & blocking[:-1], host.start_ns[:-1], host.start_ns[1:])
    waits: Longs = np.stack((began_ns, host.end_ns), axis=1)[explicit | (blocking & ~followed)]
    return waits[np.argsort(waits[:, 1], kind="stable")]


def idle_after(waits: Longs, starts: Longs, ends: Longs) -> int:
    """Return the nanoseconds without a kernel that the host's waits cost.

    `starts` and `ends` are disjoint busy intervals.  A wait is charged for what follows it until the next one
    ends: the gap before the next kernel, and more of the gaps if it took longer than that.  Time before the
    first wait belongs to the last wait of the previous step.
    """
    if not len(waits) or not len(starts):
        return 0
    # the gap before each busy interval; one that began before the first wait ended counts from there
    begins = np.append(min(starts[0], waits[0, 1]), ends[:-1])

    def gaps(from_ns: int, until_ns: int) -> Longs:
        inside = slice(np.searchsorted(starts, from_ns, "right"), np.searchsorted(begins, until_ns, "left"))
        lengths: Longs = np.minimum(starts[inside], until_ns) - np.maximum(begins[inside], from_ns)
        return lengths

    total_ns = 0
    before_first = int(gaps(begins[0], waits[0, 1]).sum())
    for number, (began, returned) in enumerate(waits):
        is_last = number == len(waits) - 1
        following = gaps(returned, ends[-1] if is_last else waits[number + 1, 1])
        at_once = len(following) and begins[np.searchsorted(starts, returned, "right")] <= returned
        idle_ns = int(following.sum()) + (before_first if is_last else 0)
        total_ns += max(int(following[0]) if at_once else 0, min(idle_ns, int(returned - began)))
    return total_ns


def _seconds_by_kind(device: Timeline, *, num_steps: int) -> tuple[dict[str, float], dict[str, float]]:
    by_category: dict[str, float] = {}
    by_dtype: dict[str, float] = {}
    for name, (_, total_ns) in _totals(device).items():
        category, seconds = kernel_category(name), total_ns / 1e9 / num_steps
        by_category[category] = by_category.get(category, 0.0) + seconds
        if category == "matmul":
            dtype = kernel_dtype(name) or "unknown"
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + seconds
    return by_category, by_dtype


def _totals(events: Timeline) -> dict[str, tuple[int, float]]:
    """Return (calls, nanoseconds) by name."""
    num = len(events.names)
    calls = np.bincount(events.code, minlength=num)
    total_ns = np.bincount(events.code, weights=events.end_ns - events.start_ns, minlength=num)
    return {
        name: (int(calls[code]), float(total_ns[code]))
        for code, name in enumerate(events.names)
        if calls[code]
    }


def _top(device: Timeline, *, num_steps: int) -> tuple[Kernel, ...]:
    ranked = sorted(_totals(device).items(), key=lambda item: -item[1][1])[:NUM_TOP]
    return tuple(
        Kernel(
            name=name,
            category=kernel_category(name),
            calls_per_step=calls / num_steps,
            total_s=total_ns / 1e9 / num_steps,
            dtype=kernel_dtype(name),
        )
        for name, (calls, total_ns) in ranked
    )


def _copies(copies: Timeline, *, num_steps: int) -> tuple[Copy, ...]:
    kinds = sorted({copy_kind(name) for name in copies.names if name.startswith("Memcpy")})
    found = []
    for kind in kinds:
        of_kind = copies.only(copies.named(lambda name, kind=kind: copy_kind(name) == kind))
        known = len(of_kind) > 0 and bool((of_kind.num_bytes >= 0).all())
        found.append(
            Copy(
                kind=kind,
                calls_per_step=len(of_kind) / num_steps,
                total_s=float((of_kind.end_ns - of_kind.start_ns).sum()) / 1e9 / num_steps,
                bytes_per_step=float(of_kind.num_bytes.sum()) / num_steps if known else None,
            )
        )
    return tuple(found)


class BackwardCosts:
    """The cost of each node of the autograd graph in the backward passes of a recording.

    Nodes carry the sequence number that the thread had when the forward operator made them
    (`torch.autograd._get_sequence_nr()`), so the numbers that a line consumed lead to its backward seconds.
    Only the nodes themselves are recorded, not the operators inside them: a fraction of the events, and
    little overhead.  A node's host seconds last from its start to the start of the next node of its thread,
    so they include the accumulation of its outputs.  The engine runs ready nodes in falling order of their
    numbers, so a rise marks another backward pass, and the node before it ends with itself.  On CUDA the
    seconds are the larger of these and of the kernels launched meanwhile: the slower side holds up the step.
    """

    _THREAD_MARK = "flatout::training thread"

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._recording = Recording(cpu=True, cuda=self._cuda, backward_only=True)
        self._sequence: Longs = np.zeros(0, dtype=np.int64)
        self._reached_s: Doubles = np.zeros(1)

    def start(self) -> None:
        import torch

        self._recording.start()
        with torch.profiler.record_function(self._THREAD_MARK):
            pass

    def stop(self) -> tuple[Longs, Doubles]:
        """Return sequence numbers in rising order, and the seconds of each node."""
        events = self._recording.stop()
        sequence, start_ns, host_ns = self._nodes(events)
        cost_ns = host_ns.astype(np.float64)
        if self._cuda and len(sequence):
            device, host = device_timelines(events)
            cost_ns = np.maximum(cost_ns, device_ns_by_node(start_ns, host_ns, device, host))
        order = np.argsort(sequence, kind="stable")
        self._sequence, seconds = sequence[order], cost_ns[order] / 1e9
        self._reached_s = np.concatenate(([0.0], np.cumsum(seconds)))
        return self._sequence, seconds

    @property
    def total_s(self) -> float:
        """Return the backward seconds of all nodes."""
        return float(self._reached_s[-1])

    def seconds_in(self, intervals: Sequence[tuple[int, int]] | Longs) -> float:
        """Return the backward seconds of nodes with a sequence number in one of the [first, last) ranges."""
        bounds = np.asarray(intervals, dtype=np.int64).reshape(-1, 2)
        positions = np.searchsorted(self._sequence, bounds)
        return float((self._reached_s[positions[:, 1]] - self._reached_s[positions[:, 0]]).sum())

    def _nodes(self, events: Sequence[Any]) -> tuple[Longs, Longs, Longs]:
        """Return (sequence number, start, host nanoseconds) of the training thread's nodes, by start."""
        mark = next((event for event in events if event.name() == self._THREAD_MARK), None)
        if mark is None:
            raise RuntimeError("the profiler recorded nothing of the training thread")
        training_thread = mark.start_thread_id()
        rows = [
            (
                event.start_thread_id(),
                event.start_ns(),
                event.duration_ns(),
                event.sequence_nr(),
                event.fwd_thread_id() == training_thread and event.sequence_nr() >= 0,
            )
            for event in events
            if event.scope() == 1  # a node; user annotations have 7
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 5)
        table = table[np.lexsort((table[:, 1], table[:, 0]))]
        mine = table[:, 4] == 1
        start_ns, sequence = table[mine, 1], table[mine, 3]
        host_ns = _until_next_node(table)[mine]
        order = np.argsort(start_ns, kind="stable")
        return sequence[order], start_ns[order], host_ns[order]


def _until_next_node(table: Longs) -> Longs:
    """Return nanoseconds per node from (thread, start, duration, sequence, ...) rows, by thread and start."""
    thread, start_ns, duration_ns, sequence = table[:, 0], table[:, 1], table[:, 2], table[:, 3]
    if len(table) < 2:
        return duration_ns
    until_next = start_ns[1:] - start_ns[:-1]
    nested = until_next < duration_ns[:-1]
    same_pass = nested | (sequence[1:] < sequence[:-1])  # AccumulateGrad has -1
    connected = (thread[1:] == thread[:-1]) & same_pass
    return np.concatenate((np.where(connected, until_next, duration_ns[:-1]), duration_ns[-1:]))


def device_ns_by_node(start_ns: Longs, host_ns: Longs, device: Timeline, host: Timeline) -> Doubles:
    """Return the nanoseconds of the kernels launched during each node; nodes are ordered by start."""
    order = np.argsort(host.correlation, kind="stable")
    known = host.correlation[order]
    position = np.searchsorted(known, device.correlation)
    found = position < len(known)
    found[found] = known[position[found]] == device.correlation[found]
    launched_ns = host.start_ns[order][position[found]]
    node = np.searchsorted(start_ns, launched_ns, side="right") - 1
    inside = (node >= 0) & (launched_ns < start_ns[node] + host_ns[node])
    lasted_ns = (device.end_ns - device.start_ns)[found]
    total_ns = np.bincount(node[inside], weights=lasted_ns[inside], minlength=len(start_ns))
    return np.asarray(total_ns, dtype=np.float64)
