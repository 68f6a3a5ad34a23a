"""Operators as the host's profiler sees them: the picture of a step without a GPU.

An operator calls others (`aten::linear` calls `aten::addmm`).  So each gets its own time, without the
operators it called, and only the outermost ones are counted: these are what a line of Python calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flatout.measure.device.kernel_names import operator_category, optimizer_kind
from flatout.measure.device.overlap import communication
from flatout.measure.evidence import Kernel, Kernels

NUM_TOP = 20
_OPTIMIZER_STEP = "Optimizer.step#"
_COLLECTIVES = ("gloo:", "mpi:", "ucc:")  # collectives that run in a thread of the backend
_ASKS = "c10d::"  # the call that starts a collective


class OperatorRow(NamedTuple):
    """One call of an operator on the host."""

    name: str
    self_ns: int  # without the operators it called
    outermost: bool
    in_optimizer: bool


def operator_rows(events: Sequence[Any]) -> list[OperatorRow]:
    """Return operators with their own time, from nested profiler events."""
    spans = []
    for event in events:
        name = event.name()
        is_operator = "::" in name and not name.startswith(("autograd::engine", "torch::autograd"))
        if is_operator or name.startswith(_OPTIMIZER_STEP):
            start_ns = event.start_ns()
            end_ns = start_ns + event.duration_ns()
            spans.append((event.start_thread_id(), start_ns, -end_ns, name, is_operator))
    spans.sort()
    # Columns, because there may be a million operators.
    names: list[str] = []
    own_ns: list[int] = []
    outermost: list[bool] = []
    in_optimizer: list[bool] = []
    open_spans: list[tuple[int, int, int, bool]] = []  # thread, end, innermost operator or -1, in optimizer
    for thread, start_ns, negative_end_ns, name, is_operator in spans:
        end_ns = -negative_end_ns
        while open_spans and (open_spans[-1][0] != thread or open_spans[-1][1] <= start_ns):
            open_spans.pop()
        parent, stepping = open_spans[-1][2:] if open_spans else (-1, False)
        if not is_operator:
            open_spans.append((thread, end_ns, parent, True))
            continue
        if parent >= 0:
            own_ns[parent] -= end_ns - start_ns
        open_spans.append((thread, end_ns, len(names), stepping))
        names.append(name)
        own_ns.append(end_ns - start_ns)
        outermost.append(parent < 0)
        in_optimizer.append(stepping)
    own_ns = [max(0, own) for own in own_ns]
    return list(map(OperatorRow, names, own_ns, outermost, in_optimizer))


def summarise_operators(rows: Sequence[OperatorRow], *, num_steps: int, step_s: float) -> Kernels:
    """Summarise a step without a GPU: operators stand for kernels; busy share and gaps stay unknown."""
    by_category: dict[str, float] = {}
    by_name: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        category = "optimizer" if row.in_optimizer else operator_category(row.name)
        seconds = row.self_ns / 1e9 / num_steps
        by_category[category] = by_category.get(category, 0.0) + seconds
        entry = by_name.setdefault((row.name, category), [0.0, 0.0])
        entry[0] += 1 / num_steps
        entry[1] += seconds
    ranked = sorted(by_name.items(), key=lambda item: -item[1][1])[:NUM_TOP]
    stepped = [row.name for row in rows if row.in_optimizer]
    return Kernels(
        num_steps=num_steps,
        step_s=step_s,
        busy_share=None,
        num_kernels=sum(row.outermost for row in rows) / num_steps,
        median_kernel_s=float(np.median([row.self_ns for row in rows])) / 1e9 if rows else None,
        gap_s=None,
        sync_gap_s=None,
        num_syncs=None,
        by_category_s=by_category,
        matmul_s_by_dtype={},
        top=tuple(
            Kernel(name=name, category=category, calls_per_step=calls, total_s=total_s)
            for (name, category), (calls, total_s) in ranked
        ),
        optimizer=optimizer_kind(stepped) or ("for-loop" if stepped else None),
    )


def with_communication(kernels: Kernels, events: Sequence[Any]) -> Kernels:
    """Add the time in collectives, and the part of it in which no operator ran."""
    collectives: list[tuple[int, int]] = []
    computation: list[tuple[int, int]] = []
    for event in events:
        name = event.name()
        if name.startswith(_COLLECTIVES):
            collectives.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        elif "::" in name and not name.startswith((_ASKS, "autograd::engine", "torch::autograd")):
            computation.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    exchange = communication(
        np.array(collectives, dtype=np.int64).reshape(-1, 2),
        np.array(computation, dtype=np.int64).reshape(-1, 2),
    )
    if exchange is None:
        return kernels
    under_way_s, exposed_s = (each / 1e9 / kernels.num_steps for each in exchange)
    return replace(kernels, communication_s=under_way_s, exposed_s=exposed_s)
