"""What a node of a tree says by itself: the names it reads, binds and changes, and what it calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import libcst as cst


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and everything below it."""
    yield node
    for child in node.children:
        yield from walk(child)


def reads(node: cst.CSTNode) -> list[cst.Name]:
    """Return the names used in a node, including those it binds, without attributes and keywords."""
    found: list[cst.Name] = []

    def collect(each: cst.CSTNode) -> None:
        if isinstance(each, cst.Name):
            found.append(each)
        elif isinstance(each, (cst.Attribute, cst.Arg)):
            collect(each.value)
        else:
            for child in each.children:
                collect(child)

    collect(node)
    return found


def names(node: cst.CSTNode) -> set[str]:
    return {each.value for each in reads(node)}


def target_names(target: cst.CSTNode) -> list[cst.Name]:
    """Return the plain names that an assignment target binds."""
    if isinstance(target, cst.Name):
        return [target]
    if isinstance(target, (cst.Tuple, cst.List)):
        return [name for element in target.elements for name in target_names(element.value)]
    if isinstance(target, cst.StarredElement):
        return target_names(target.value)
    return []


def bindings(node: cst.CSTNode) -> list[cst.Name]:
    """Return the names that a node binds, in nested statements too."""
    found: list[cst.Name] = []
    for each in walk(node):
        if isinstance(each, cst.Assign):
            for assigned in each.targets:
                found += target_names(assigned.target)
        elif isinstance(each, (cst.AnnAssign, cst.AugAssign, cst.For, cst.CompFor, cst.NamedExpr)):
            found += target_names(each.target)
        elif isinstance(each, cst.AsName):
            found += target_names(each.name)
        elif isinstance(each, (cst.FunctionDef, cst.ClassDef)):
            found.append(each.name)
        elif isinstance(each, (cst.Global, cst.Nonlocal)):
            found += [item.name for item in each.names]
        elif isinstance(each, cst.Del):
            found += target_names(each.target)
        elif isinstance(each, cst.ImportAlias) and each.asname is None:
            root: Any = each.name
            while isinstance(root, cst.Attribute):
                root = root.value
            found.append(root)
    return found


def changed_names(node: cst.CSTNode) -> set[str]:
    """Return the names that a node binds, writes into, or changes by calling a method."""
    found = {each.value for each in bindings(node)}
    for each in walk(node):
        written: Iterable[cst.CSTNode] = ()
        if isinstance(each, cst.Assign):
            written = [assigned.target for assigned in each.targets]
        elif isinstance(each, (cst.AugAssign, cst.AnnAssign, cst.Del, cst.For)):
            written = [each.target]
        elif isinstance(each, cst.Call) and isinstance(each.func, cst.Attribute):
            called = each.func.attr.value
            if called in CHANGING or (called.endswith("_") and not called.endswith("__")):
                written = [each.func.value]
        for target in written:
            base = base_name(target)
            if base is not None:
                found.add(base)
    return found


CHANGING = {
    "append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "update", "add", "discard",
    "setdefault", "popitem", "load_state_dict",
}  # fmt: skip


def base_name(node: cst.CSTNode) -> str | None:
    """Return `x` of `x`, `x[i]`, `x.y[j]` or `x.y(...)`; `self.x` of `self.x` and anything below it."""
    while True:
        if isinstance(node, cst.Attribute):
            if isinstance(node.value, cst.Name) and node.value.value in ("self", "cls"):
                return f"{node.value.value}.{node.attr.value}"
            node = node.value
        elif isinstance(node, cst.Subscript):
            node = node.value
        elif isinstance(node, cst.Call):
            node = node.func
        else:
            return node.value if isinstance(node, cst.Name) else None


def dotted_name(node: cst.CSTNode) -> str | None:
    """Return `torch.nn.functional.pad` as text; None for anything but names and dots."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        left = dotted_name(node.value)
        return None if left is None else f"{left}.{node.attr.value}"
    return None


def call_of(node: cst.CSTNode | None) -> str | None:
    """Return the dotted name of the function that a call calls."""
    return dotted_name(node.func) if isinstance(node, cst.Call) else None


def method_of(node: cst.CSTNode | None) -> str | None:
    """Return the last name of the function that a call calls: `item` of `loss.mean().item()`."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.attr.value
    return None


def argument(call: cst.Call, name: str, place: int | None = None) -> cst.BaseExpression | None:
    """Return an argument by its keyword or its position."""
    for number, each in enumerate(call.args):
        if each.star:
            continue
        if (each.keyword is not None and each.keyword.value == name) or (
            each.keyword is None and number == place
        ):
            return each.value
    return None


def simple(statement: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """Return the single small statement of a line; None for blocks and for lines with several."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        return statement.body[0]
    return None


def read_assignment(statement: cst.CSTNode) -> tuple[str, cst.BaseExpression] | None:
    """Return (name, value) of `name = value`."""
    small = simple(statement)
    if isinstance(small, cst.Assign) and len(small.targets) == 1:
        target = small.targets[0].target
        if isinstance(target, cst.Name):
            return target.value, small.value
    if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name) and small.value is not None:
        return small.target.value, small.value
    return None


def read_append(statement: cst.CSTNode) -> tuple[str, cst.BaseExpression] | None:
    """Return (name, value) of `name.append(value)`."""
    small = simple(statement)
    if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
        call = small.value
        if method_of(call) == "append" and len(call.args) == 1 and not call.args[0].star:
            owner = call.func.value if isinstance(call.func, cst.Attribute) else None
            if isinstance(owner, cst.Name):
                return owner.value, call.args[0].value
    return None


def is_empty_list(node: cst.CSTNode) -> bool:
    return (isinstance(node, cst.List) and not node.elements) or (
        isinstance(node, cst.Call) and call_of(node) == "list" and not node.args
    )


def is_zero(node: cst.CSTNode | None) -> bool:
    return isinstance(node, cst.Integer) and node.value == "0"
