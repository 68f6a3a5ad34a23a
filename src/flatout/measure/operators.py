"""Operators as the host's profiler sees them: the picture of a step where there is no GPU.

An operator calls others (`aten::linear` calls `aten::addmm`), so each gets its own time, without what it
called, and the outermost ones are counted: they are what a line of Python asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.measure.evidence import Kernel, Kernels
from flatout.measure.kernel_names import operator_category, optimizer_kind

NUM_TOP = 20
_OPTIMIZER_STEP = "Optimizer.step#"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRow:
    """One call of an operator on the host."""

    name: str
    self_ns: int  # without the operators it called
    outermost: bool
    in_optimizer: bool


def operator_rows(events: Sequence[Any]) -> list[OperatorRow]:
    """Operators with their own time, from nested profiler events."""
    spans = []
    for event in events:
        name = event.name()
        is_operator = "::" in name and not name.startswith(("autograd::engine", "torch::autograd"))
        if is_operator or name.startswith(_OPTIMIZER_STEP):
            start_ns, thread = event.start_ns(), event.start_thread_id()
            spans.append((thread, start_ns, -(start_ns + event.duration_ns()), name, is_operator))
    spans.sort()
    rows: list[OperatorRow] = []
    own_ns: list[int] = []
    depth: list[tuple[int, int, int, bool]] = []  # thread, end, position in rows, inside an optimizer step
    for thread, start_ns, negative_end_ns, name, is_operator in spans:
        end_ns = -negative_end_ns
        while depth and (depth[-1][0] != thread or depth[-1][1] <= start_ns):
            depth.pop()
        parent = next((entry[2] for entry in reversed(depth) if entry[2] >= 0), -1)
        in_optimizer = (bool(depth) and depth[-1][3]) or not is_operator
        if is_operator:
            if parent >= 0:
                own_ns[parent] -= end_ns - start_ns
            depth.append((thread, end_ns, len(rows), in_optimizer))
            own_ns.append(end_ns - start_ns)
            rows.append(OperatorRow(name=name, self_ns=0, outermost=parent < 0, in_optimizer=in_optimizer))
        else:
            depth.append((thread, end_ns, -1, True))
    return [
        OperatorRow(
            name=row.name, self_ns=max(0, own), outermost=row.outermost, in_optimizer=row.in_optimizer
        )
        for row, own in zip(rows, own_ns, strict=True)
    ]


def summarise_operators(rows: Sequence[OperatorRow], *, num_steps: int, step_s: float) -> Kernels:
    """The same picture without a GPU: operators stand for kernels, busy and gaps stay unknown."""
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
