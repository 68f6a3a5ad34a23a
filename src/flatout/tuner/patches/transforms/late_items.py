"""Sum losses on the device and read them where they are used, instead of in every step.

    total += loss.item()                  total += loss.detach().double()
    if step % 100 == 0:           ->      if step % 100 == 0:
        print(total / 100)                    print(float(total) / 100)

`item()` waits for the device.  The sum is kept in 64 bits, as Python keeps it; counts stay whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.purity import impure_part
from flatout.tuner.patches.source import Refused, Replacement, SourceFile, binds_itself, expression
from flatout.tuner.patches.syntax import bindings, method_of, reads, walk

OTHER_BINDINGS = (cst.For, cst.CompFor, cst.NamedExpr, cst.AnnAssign)


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    changes: dict[cst.CSTNode, Replacement] = {}
    reason = "no loop here sums .item()"
    seen: set[tuple[cst.CSTNode, str]] = set()
    for each in walk(source.module):
        if not isinstance(each, cst.AugAssign) or not isinstance(each.operator, cst.AddAssign):
            continue
        if lines and not any(source.holds(each, line) for line in lines):
            continue
        if not _item(each.value) or not source.loops_around(each) or not isinstance(each.target, cst.Name):
            continue
        scope = source.scope(each)
        if (scope, each.target.value) in seen:
            continue
        seen.add((scope, each.target.value))
        try:
            changes.update(_read_late(source, each.target.value, scope))
        except Refused as refusal:
            reason = str(refusal)
    if not changes:
        raise Refused(reason)
    return source.replaced(changes)


def _item(value: cst.CSTNode) -> cst.Call | None:
    """Return the only `.item()` in what is added: alone, or multiplied or divided by plain numbers."""
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, (cst.Multiply, cst.Divide)):
        found = [_item(side) for side in (value.left, value.right)]
        others = [side for side, item in zip((value.left, value.right), found, strict=True) if item is None]
        if len(others) == 1 and impure_part(others[0], {}) is None:
            return found[0] or found[1]
        return None
    is_item = method_of(value) == "item" and isinstance(value, cst.Call) and not value.args
    return value if is_item and isinstance(value, cst.Call) else None


def _read_late(source: SourceFile, name: str, scope: cst.CSTNode) -> dict[cst.CSTNode, Replacement]:
    sums = [
        each
        for each in walk(scope)
        if isinstance(each, cst.AugAssign) and isinstance(each.target, cst.Name) and each.target.value == name
    ]
    items = [_item(each.value) for each in sums]
    if None in items or not all(isinstance(each.operator, cst.AddAssign) for each in sums):
        raise Refused(f"{name} is changed by more than adding .item()")
    _check_resets(source, name, scope)
    counts = [_counts(each.value) for each in sums]
    if any(counts) != all(counts):
        raise Refused(f"{name} sums both counts and other numbers")
    changes: dict[cst.CSTNode, Replacement] = {}
    for item in items:
        assert item is not None and isinstance(item.func, cst.Attribute)
        inner = source.code(item.func.value)
        changes[item] = expression(f"{inner}.detach()" + ("" if counts[0] else ".double()"))
    bound = set(bindings(scope))
    for word in reads(scope):
        if word.value != name or word in bound:
            continue
        if source.scope(word) is not scope:
            if binds_itself(source, word, scope):
                continue
            raise Refused(f"{name} is read in another function")
        above = source.parent(word)
        if isinstance(above, cst.AugAssign) and above.target is word:
            continue
        changes[word] = expression(f"{'int' if counts[0] else 'float'}({name})")
    if len(changes) == len(sums):
        raise Refused(f"{name} is never read in this function")
    return changes


def _counts(value: cst.CSTNode) -> bool:
    """Return whether the sum is of `(a == b).sum().item()`: an integer."""
    if isinstance(value, cst.BinaryOperation):
        return False
    return any(isinstance(each, cst.Comparison) for each in walk(value)) and not any(
        method_of(each) in ("mean", "float", "double") or isinstance(each, cst.Divide) for each in walk(value)
    )


def _check_resets(source: SourceFile, name: str, scope: cst.CSTNode) -> None:
    """Require that every other binding gives it a plain number."""
    for each in walk(scope):
        if isinstance(each, (cst.Global, cst.Nonlocal)) and name in {item.name.value for item in each.names}:
            raise Refused(f"{name} is shared with other functions")
        if isinstance(each, OTHER_BINDINGS) and name in {
            word.value for word in bindings(each) if source.parent(word) is each
        }:
            raise Refused(f"{name} is bound in a way that cannot be traced")
        if not isinstance(each, cst.Assign):
            continue
        for assigned in each.targets:
            target = assigned.target
            if isinstance(target, cst.Name) and target.value == name and not _is_number(each.value):
                raise Refused(f"{name} does not start as a number")
            if isinstance(target, (cst.Tuple, cst.List)):
                place = [element.value for element in target.elements]
                here = [
                    number
                    for number, item in enumerate(place)
                    if isinstance(item, cst.Name) and item.value == name
                ]
                values = each.value.elements if isinstance(each.value, (cst.Tuple, cst.List)) else ()
                if here and (len(values) != len(place) or not _is_number(values[here[0]].value)):
                    raise Refused(f"{name} does not start as a number")
    if isinstance(scope, cst.FunctionDef) and name in {param.name.value for param in scope.params.params}:
        raise Refused(f"{name} is an argument of the function")


def _is_number(node: cst.CSTNode) -> bool:
    return isinstance(node, (cst.Integer, cst.Float))


PATCH = Patch(
    rewrite, "sum losses on the device and read them where they are used", safety="exact", answers=("FO202",)
)
