"""Keep losses in a list as tensors and read them where the list is used, instead of in every step.

    losses.append(loss.item())          losses.append(loss.detach().clone())
    print(sum(losses))          ->      print(sum([each.item() for each in losses]))

`item()` waits for the device; a value that was computed long ago is read without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.source import Refused, Replacement, SourceFile, binds_itself, expression
from flatout.tuner.patches.syntax import (
    bindings,
    call_of,
    is_empty_list,
    method_of,
    read_append,
    read_assignment,
    reads,
    walk,
)

KEPT_METHODS = ("append", "clear")


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    changes: dict[cst.CSTNode, Replacement] = {}
    reason = "no loop here appends .item() to a list"
    seen: set[tuple[cst.CSTNode, str]] = set()
    for each in walk(source.module):
        added = read_append(each)
        if added is None or not _is_item(added[1]) or not source.loops_around(each):
            continue
        scope = source.scope(each)
        if (lines and not any(source.holds(each, line) for line in lines)) or (scope, added[0]) in seen:
            continue
        seen.add((scope, added[0]))
        try:
            changes.update(_read_late(source, added[0], scope))
        except Refused as refusal:
            reason = str(refusal)
    if not changes:
        raise Refused(reason)
    return source.replaced(changes)


def _is_item(node: cst.CSTNode) -> bool:
    return method_of(node) == "item" and isinstance(node, cst.Call) and not node.args


def _read_late(source: SourceFile, name: str, scope: cst.CSTNode) -> dict[cst.CSTNode, Replacement]:
    changes: dict[cst.CSTNode, Replacement] = {}
    for each in walk(scope):
        added, made = read_append(each), read_assignment(each)
        if added is not None and added[0] == name:
            value = added[1]
            if (
                not _is_item(value)
                or not isinstance(value, cst.Call)
                or not isinstance(value.func, cst.Attribute)
            ):
                raise Refused(f"{name} holds more than results of .item()")
            changes[value] = expression(f"{source.code(value.func.value)}.detach().clone()")
        if made is not None and made[0] == name and not is_empty_list(made[1]):
            raise Refused(f"{name} does not start as an empty list")
    bound = [word for word in bindings(scope) if word.value == name]
    begins = [word for word in bound if (read_assignment(source.statement(word)) or ("",))[0] == name]
    if not begins or len(begins) != len(bound):
        raise Refused(f"{name} is bound in a way that cannot be traced")
    for word in reads(scope):
        if word.value == name and word not in bound:
            changes.update(_read(source, word, scope))
    return changes


def _read(source: SourceFile, word: cst.Name, scope: cst.CSTNode) -> dict[cst.CSTNode, Replacement]:
    """Rewrite a use of the list; nothing if only its length or the list itself is used."""
    name, above = word.value, source.parent(word)
    if source.scope(word) is not scope:
        if binds_itself(source, word, scope):
            return {}
        raise Refused(f"{name} is used in another function")
    if isinstance(above, cst.Attribute):
        if above.attr.value in KEPT_METHODS:
            return {}
        raise Refused(f"{name}.{above.attr.value} is used")
    if isinstance(above, cst.Arg) and call_of(source.parent(above)) == "len":
        return {}
    if isinstance(above, cst.Subscript) and above.value is word:
        outer = source.parent(above)
        if isinstance(outer, (cst.AssignTarget, cst.Del, cst.AugAssign)):
            raise Refused(f"an entry of {name} is changed")
        if all(isinstance(item.slice, cst.Index) for item in above.slice):
            return {above: expression(f"{source.code(above)}.item()")}
        return {above: expression(f"[each.item() for each in {source.code(above)}]")}
    return {word: expression(f"[each.item() for each in {name}]")}


PATCH = Patch(
    rewrite, "keep losses as tensors and read them where the list is used", safety="exact", answers=("FO202",)
)
