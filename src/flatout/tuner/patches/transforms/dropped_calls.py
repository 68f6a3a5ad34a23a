"""Remove calls that only help to debug or save memory.

`torch.cuda.empty_cache()` in a loop returns memory that the next iteration allocates again;
`torch.cuda.synchronize()` makes the host wait; anomaly detection records a stack for every operation; and
`zero_grad(set_to_none=False)` fills gradients with zeros that the next backward could have written.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.source import Refused, Replacement, SourceFile
from flatout.tuner.patches.syntax import argument, call_of, dotted_name, method_of, simple, walk

IN_LOOPS = ("torch.cuda.empty_cache", "torch.cuda.synchronize")
ANYWHERE = ("torch.autograd.set_detect_anomaly",)
CLOCKS = {"perf_counter", "time", "monotonic", "process_time", "perf_counter_ns", "time_ns"}


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    changes: dict[cst.CSTNode, Replacement] = {}
    for each in walk(source.module):
        if isinstance(each, cst.SimpleStatementLine):
            small = simple(each)
            called = call_of(small.value) if isinstance(small, cst.Expr) else None
            in_loop = called in IN_LOOPS and bool(source.loops_around(each))
            if (in_loop or called in ANYWHERE) and not (called == IN_LOOPS[1] and _times(source, each)):
                alone = len(source.block(each)) == 1
                changes[each] = cst.SimpleStatementLine(body=[cst.Pass()]) if alone else None
        elif isinstance(each, cst.Call) and method_of(each) == "zero_grad" and source.loops_around(each):
            kept = argument(each, "set_to_none", 0)
            if kept is not None and dotted_name(kept) == "False":
                changes[each] = each.with_changes(args=[])
    if lines:
        changes = {
            node: new for node, new in changes.items() if any(source.holds(node, line) for line in lines)
        }
    if not changes:
        raise Refused("no call here is only for debugging")
    return source.replaced(changes)


def _times(source: SourceFile, node: cst.CSTNode) -> bool:
    """Return whether the function reads a clock: then a wait belongs to its measurement."""
    return any(
        (call_of(each) or "").rpartition(".")[2] in CLOCKS
        for each in walk(source.scope(node))
        if isinstance(each, cst.Call)
    )


PATCH = Patch(
    rewrite,
    "leave out empty_cache, synchronize, anomaly detection and gradients filled with zeros",
    safety="exact",
)
