"""Find the line that stores a value under a name: `losses.append(loss)`, `total += loss`, `self.h = h`.

An object keeps a tensor alive; its owner needs to see the line that stored it there.  This searches the
source for stores into the name and chooses the likeliest: one that makes something grow or feeds a value back
into itself, inside a loop, rather than an initial `losses = []`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GROWING_METHODS = frozenset(
    ("append", "appendleft", "add", "extend", "insert", "update", "setdefault", "put", "push")
)
_DETACHING_METHODS = frozenset(("item", "detach", "tolist", "numpy"))
_DETACHING_FUNCTIONS = frozenset(("float", "int", "str", "len"))
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoringLine:
    """One statement that stores into a name or attribute."""

    name: str
    attribute: bool
    through_self: bool
    line: int
    function: str | None
    grows: bool
    in_loop: bool
    detached: bool  # it stores a number or a tensor without its graph

    @property
    def likelihood(self) -> tuple[bool, bool, bool]:
        return (self.grows, not self.detached, self.in_loop or self.function is not None)


def find_storing_line(
    path: str, name: str, *, attribute: bool = False, lines: tuple[int, int] | None = None
) -> StoringLine | None:
    """Return the likeliest store into `name` in the file at `path`, within `lines` if they are given."""
    stores = [
        store
        for store in storing_lines(path)
        if store.name == name
        and store.attribute == attribute
        and (lines is None or lines[0] <= store.line <= lines[1])
    ]
    return max(stores, key=lambda store: (*store.likelihood, -store.line), default=None)


@functools.cache  # unlimited: every search reads all files of the user's modules, in one order
def storing_lines(path: str) -> tuple[StoringLine, ...]:
    """Return every store of a source file; none when it cannot be read or parsed."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(_stores(tree, function=(), in_loop=False))


def _stores(node: ast.AST, *, function: tuple[str, ...], in_loop: bool) -> Iterator[StoringLine]:
    for target, value, grows, line in _targets(node):
        named = _named(target)
        if named is None:
            continue
        name, attribute, through_self, subscripted = named
        feeds_back = value is not None and _mentions(value, name, attribute=attribute)
        yield StoringLine(
            name=name,
            attribute=attribute,
            through_self=through_self,
            line=line,
            function=".".join(function) or None,
            grows=grows or subscripted or feeds_back,
            in_loop=in_loop,
            detached=value is not None and _is_detached(value),
        )
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        function, in_loop = (*function, node.name), False
    inside = in_loop or isinstance(node, _LOOPS)
    for child in ast.iter_child_nodes(node):
        yield from _stores(child, function=function, in_loop=inside)


def _targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None, bool, int]]:
    """Yield (target, value, whether the target grows by it, line) for one statement or call."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else (target,):
                yield part, node.value, False, node.lineno
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        yield node.target, node.value, False, node.lineno
    elif isinstance(node, ast.AugAssign):
        yield node.target, node.value, True, node.lineno
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _GROWING_METHODS
        and node.args
    ):
        yield node.func.value, node.args[-1], True, node.lineno


def _named(target: ast.expr) -> tuple[str, bool, bool, bool] | None:
    """Return (name, is an attribute, of self, through a subscript) for the target of a store."""
    subscripted = False
    while isinstance(target, (ast.Subscript, ast.Starred)):
        subscripted = subscripted or isinstance(target, ast.Subscript)
        target = target.value
    if isinstance(target, ast.Name):
        return target.id, False, False, subscripted
    if isinstance(target, ast.Attribute):
        through_self = isinstance(target.value, ast.Name) and target.value.id == "self"
        return target.attr, True, through_self, subscripted
    return None


def _mentions(value: ast.expr, name: str, *, attribute: bool) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr == name)
        if attribute
        else (isinstance(node, ast.Name) and node.id == name)
        for node in ast.walk(value)
    )


def _is_detached(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return True
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Attribute):
        return value.func.attr in _DETACHING_METHODS or _is_detached(value.func.value)
    return isinstance(value.func, ast.Name) and value.func.id in _DETACHING_FUNCTIONS
