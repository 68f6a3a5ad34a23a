"""Compute once, before a loop, what every iteration of it computes alike.

    for t in range(n):                          constant = self.kind(torch.tensor([0]))
        rows.append(x[t] + self.kind(           for t in range(n):
            torch.tensor([0])))         ->          rows.append(x[t] + constant)

Only parts of larger expressions move: a tensor that is stored or written to must be a separate one in each
iteration.  In a loop that trains, expressions that read parameters stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.purity import CREATING, impure_part, module_kinds
from flatout.tuner.patches.source import (
    LoopNode,
    Refused,
    Replacement,
    SourceFile,
    expression,
    free_name,
    same,
    statements,
)
from flatout.tuner.patches.syntax import (
    base_name,
    call_of,
    changed_names,
    dotted_name,
    method_of,
    names,
    walk,
)

TRAINS = {"backward", "step", "load_state_dict", "zero_grad"}


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    by_loop: dict[LoopNode, list[cst.Call]] = {}
    for each in walk(source.module):
        if not isinstance(each, cst.Call) or not _is_part(source, each):
            continue
        if lines and not any(source.holds(source.statement(each), line) for line in lines):
            continue
        loop = _outermost_loop(source, each)
        # a larger part of it may already move
        if loop is not None and not _is_inside(source, each, by_loop):
            by_loop.setdefault(loop, []).append(each)
    if not by_loop:
        raise Refused("nothing computed here stays the same in every iteration")
    changes: dict[cst.CSTNode, Replacement] = {}
    before: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
    taken = 0
    for loop, calls in by_loop.items():
        named: list[tuple[cst.Call, str]] = []
        for call in calls:
            name = next((known for one, known in named if same(one, call)), None)
            if name is None:
                taken += 1
                name = free_name(source, "constant" if taken == 1 else f"constant_{taken}")
                named.append((call, name))
                before.setdefault(loop, []).extend(statements(f"{name} = {source.code(call)}\n"))
            changes[call] = expression(name)
    return source.replaced(changes, before=before)


def _is_inside(source: SourceFile, node: cst.Call, by_loop: dict[LoopNode, list[cst.Call]]) -> bool:
    taken = {call for calls in by_loop.values() for call in calls}
    return any(above in taken for above in source.ancestors(node))


def _is_part(source: SourceFile, node: cst.Call) -> bool:
    """Return whether only an operator or another pure call sees the value."""
    kinds = module_kinds(source, node)
    called = call_of(node) or ""
    makes = called.startswith("torch.") and called.rpartition(".")[2] in CREATING
    if not (makes or called in kinds) or impure_part(node, kinds) is not None:
        return False
    above = source.parent(node)
    if isinstance(above, cst.Arg):
        outer = source.parent(above)
        return (
            isinstance(outer, cst.Call) and impure_part(outer, kinds) is None and method_of(outer) != "append"
        )
    return isinstance(above, (cst.BinaryOperation, cst.UnaryOperation, cst.Comparison))


def _outermost_loop(source: SourceFile, node: cst.Call) -> LoopNode | None:
    """Return the outermost loop that changes nothing a call reads."""
    found = None
    reads_modules = any(dotted_name(each) in module_kinds(source, node) for each in walk(node))
    for loop in source.loops_around(node):
        changed = changed_names(loop)
        attributes = {base_name(each) for each in walk(node) if isinstance(each, cst.Attribute)}
        if names(node) & changed or attributes & changed:
            break
        if reads_modules and any(
            method_of(each) in TRAINS for each in walk(loop) if isinstance(each, cst.Call)
        ):
            break
        if isinstance(loop, cst.For) and any(each is node for each in walk(loop.iter)):
            break
        if isinstance(loop, cst.While) and any(each is node for each in walk(loop.test)):
            break
        found = loop
    return found


PATCH = Patch(
    rewrite,
    "compute before a loop what no iteration of it changes",
    safety="reordered",
    answers=("FO301", "FO304"),
)
