"""Keep batches in page-locked memory and copy them to the GPU without waiting.

DataLoader(dataset, ...)          DataLoader(dataset, ..., pin_memory=True)
batch.to(device)          ->      batch.to(device, non_blocking=True)
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.source import Refused, Replacement, SourceFile, expression
from flatout.tuner.patches.syntax import argument, call_of, method_of, walk

PIN_MEMORY_PLACE = 7


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    changes: dict[cst.CSTNode, Replacement] = {}
    loaders = 0
    for each in walk(source.module):
        if not isinstance(each, cst.Call) or any(arg.star for arg in each.args):
            continue
        called = (call_of(each) or "").rpartition(".")[2]
        if called == "DataLoader" and argument(each, "pin_memory", PIN_MEMORY_PLACE) is None:
            changes[each] = with_argument(each, "pin_memory", "True")
            loaders += 1
        elif method_of(each) in ("to", "cuda") and _is_copy(source, each, lines):
            changes[each] = with_argument(each, "non_blocking", "True")
    if not loaders:
        raise Refused("no DataLoader without pinned memory is made in this file")
    return source.replaced(changes)


def _is_copy(source: SourceFile, call: cst.Call, lines: Sequence[int]) -> bool:
    here = source.line(call) in lines if lines else bool(source.loops_around(call))
    return here and len(call.args) <= 1 and argument(call, "non_blocking", 1) is None


def with_argument(call: cst.Call, name: str, value: str) -> cst.Call:
    """Add a keyword to a call, formatted like its last argument."""
    new = cst.Arg(
        keyword=cst.Name(name),
        value=expression(value),
        equal=cst.AssignEqual(
            whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace("")
        ),
    )
    if not call.args:
        return call.with_changes(args=[new])
    last = call.args[-1]
    between = (
        call.args[-2].comma if len(call.args) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    )
    return call.with_changes(
        args=[
            *call.args[:-1],
            last.with_changes(comma=between, whitespace_after_arg=cst.SimpleWhitespace("")),
            new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg),
        ]
    )


PATCH = Patch(
    rewrite,
    "keep batches in page-locked memory and copy them without waiting",
    safety="exact",
    answers=("FO201",),
)
