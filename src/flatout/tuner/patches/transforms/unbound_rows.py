"""Unbind a tensor before a loop that must read its rows one after another.

    for t in range(x.size(1)):                rows = x.unbind(1)
        h = cell(x[:, t], h)          ->      for t in range(x.size(1)):
                                                  h = cell(rows[t], h)

`unbind` has one backward for all rows; each row alone has a gradient as large as all of `x`.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.source import Refused, Replacement, SourceFile, expression, free_name, statements
from flatout.tuner.patches.syntax import base_name, call_of, changed_names, dotted_name, names, walk


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    found: dict[cst.For, dict[str, list[cst.Subscript]]] = {}
    for each in walk(source.module):
        if isinstance(each, cst.Subscript) and (not lines or source.line(each) in lines):
            place = _place(source, each)
            if place is not None:
                found.setdefault(place[0], {}).setdefault(place[1], []).append(each)
    changes: dict[cst.CSTNode, Replacement] = {}
    before: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
    number = 0
    for loop, by_whole in found.items():
        for whole, subscripts in by_whole.items():
            number += 1
            name = free_name(source, "rows" if number == 1 else f"rows_{number}")
            before.setdefault(loop, []).extend(statements(f"{name} = {whole}\n"))
            changes.update({each: expression(f"{name}[{_counter(loop)}]") for each in subscripts})
    if not changes:
        raise Refused("no loop counter selects a row here")
    return source.replaced(changes, before=before)


def _counter(loop: cst.For) -> str | None:
    """Return the name that counts from 0 or above."""
    called = call_of(loop.iter)
    if called == "range" and isinstance(loop.target, cst.Name) and isinstance(loop.iter, cst.Call):
        negative = any(isinstance(each.value, cst.UnaryOperation) for each in loop.iter.args)
        return None if negative else loop.target.value
    if called == "enumerate" and isinstance(loop.target, cst.Tuple) and isinstance(loop.iter, cst.Call):
        first = loop.target.elements[0].value
        return first.value if isinstance(first, cst.Name) and len(loop.iter.args) == 1 else None
    return None


def _place(source: SourceFile, node: cst.Subscript) -> tuple[cst.For, str] | None:
    """Return (the loop whose counter selects the row, all rows as text) of `x[:, t]`, `x[t]`, `x[b, t]`."""
    owner = dotted_name(node.value)
    parent = source.parent(node)
    if owner is None or isinstance(parent, (cst.AssignTarget, cst.AugAssign, cst.Del)):
        return None
    for loop in source.loops_around(node):
        counter = _counter(loop) if isinstance(loop, cst.For) else None
        if counter is None or not isinstance(loop, cst.For):
            continue
        kinds = [_kind(item, counter) for item in node.slice]
        if kinds.count("counter") != 1:
            continue
        place = kinds.index("counter")
        leading, trailing = kinds[:place], kinds[place + 1 :]
        changed = changed_names(loop)
        if base_name(node.value) in changed or _rebinds(loop, counter) or any(k != "all" for k in trailing):
            return None
        if all(kind == "all" for kind in leading):
            return loop, f"{owner}.unbind({place})"
        if all(kind == "index" for kind in leading):
            indices = node.slice[:place]
            if any(names(item) & changed for item in indices):
                return None
            inner = ", ".join(source.code(item.slice) for item in indices)
            return loop, f"{owner}[{inner}].unbind(0)"
        return None
    return None


def _rebinds(loop: cst.For, counter: str) -> bool:
    return counter in changed_names(loop.body)


def _kind(item: cst.SubscriptElement, counter: str) -> str:
    inner = item.slice
    if isinstance(inner, cst.Index):
        if isinstance(inner.value, cst.Name):
            return "counter" if inner.value.value == counter else "index"
        return "other"
    plain = (
        isinstance(inner, cst.Slice) and inner.lower is None and inner.upper is None and inner.step is None
    )
    return "all" if plain else "other"


PATCH = Patch(
    rewrite,
    "cut a tensor into its rows once, before the loop that reads them",
    safety="reordered",
    answers=("FO302",),
)
