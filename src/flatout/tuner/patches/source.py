"""A file of the user's as a tree that keeps every space, and what can be read off it without running it.

Nothing here knows types.  A name is traced inside one function; callers refuse what cannot be traced.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from flatout.tuner.patches.syntax import bindings, simple, target_names, walk

Scope = cst.FunctionDef | cst.Module
LoopNode = cst.For | cst.While
Replacement = cst.CSTNode | Sequence[cst.CSTNode] | None  # None removes the node


class Refused(Exception):
    """Why a patch leaves a file alone, as a sentence without its full stop."""


class SourceFile:
    """The tree of one file."""

    def __init__(self, text: str) -> None:
        try:
            wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        except cst.ParserSyntaxError:
            raise Refused("the file is not Python that can be parsed") from None
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)

    def line(self, node: cst.CSTNode) -> int:
        return int(self._positions[node].start.line)

    def last_line(self, node: cst.CSTNode) -> int:
        return int(self._positions[node].end.line)

    def holds(self, node: cst.CSTNode, line: int) -> bool:
        return self.line(node) <= line <= self.last_line(node)

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        above = self.parent(node)
        while above is not None:
            yield above
            above = self.parent(above)

    def scope(self, node: cst.CSTNode) -> Scope:
        """Return the function around a node, or the module."""
        return next(each for each in self.ancestors(node) if isinstance(each, (cst.FunctionDef, cst.Module)))

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        return next((each for each in self.ancestors(node) if isinstance(each, cst.ClassDef)), None)

    def loops_around(self, node: cst.CSTNode) -> list[LoopNode]:
        """Return loops of the same function, innermost first."""
        found: list[LoopNode] = []
        for above in self.ancestors(node):
            if isinstance(above, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
                break
            if isinstance(above, (cst.For, cst.While)):
                found.append(above)
        return found

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the smallest statement around a node that stands in a block of its own."""
        found = node
        while not isinstance(self.parent(found), (cst.IndentedBlock, cst.Module)):
            above = self.parent(found)
            assert above is not None
            found = above
        return found

    def block(self, statement: cst.CSTNode) -> Sequence[cst.BaseStatement]:
        """Return the block of statements that holds a statement."""
        above = self.parent(statement)
        assert isinstance(above, (cst.IndentedBlock, cst.Module))
        return list(above.body)

    def replaced(
        self,
        changes: Mapping[cst.CSTNode, Replacement],
        *,
        before: Mapping[cst.CSTNode, Sequence[cst.BaseStatement]] | None = None,
    ) -> str:
        """Return the text with some nodes replaced and statements inserted before others."""
        changed: Any = self.module.visit(_Replace(changes, before or {}))
        assert isinstance(changed, cst.Module)
        return changed.code


class _Replace(cst.CSTTransformer):
    def __init__(
        self,
        changes: Mapping[cst.CSTNode, Replacement],
        before: Mapping[cst.CSTNode, Sequence[cst.BaseStatement]],
    ) -> None:
        super().__init__()
        self._changes, self._before = changes, before

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if original_node in self._before:
            first, *others = self._before[original_node]
            first = first.with_changes(leading_lines=original_node.leading_lines)
            return cst.FlattenSentinel([first, *others, updated_node.with_changes(leading_lines=[])])
        if original_node not in self._changes:
            return super().on_leave(original_node, updated_node)
        new = self._changes[original_node]
        if new is None:
            return cst.RemoveFromParent()
        return new if isinstance(new, cst.CSTNode) else cst.FlattenSentinel(new)


def substitute(node: Any, changes: Mapping[cst.CSTNode, cst.CSTNode]) -> Any:
    """Copy an expression with some of its parts replaced."""
    return node.visit(_Replace(changes, {}))


def binds_itself(source: SourceFile, name: cst.Name, scope: cst.CSTNode) -> bool:
    """Return whether a name is a target, or in a loop, comprehension or function that rebinds it."""
    if isinstance(source.parent(name), (cst.AssignTarget, cst.CompFor, cst.Param)):
        return True
    for above in source.ancestors(name):
        if above is scope:
            return False
        bound: set[str] = set()
        if isinstance(above, cst.For):
            bound = {each.value for each in target_names(above.target)}
        elif isinstance(above, (cst.ListComp, cst.GeneratorExp, cst.SetComp, cst.DictComp)):
            bound = {each.value for each in bindings(above)}
        elif isinstance(above, cst.FunctionDef):
            bound = {each.value for each in bindings(above.body)}
            return name.value in bound | {each.name.value for each in above.params.params}
        if name.value in bound:
            return True
    return False


def same(one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Return whether two expressions are the same apart from spaces."""
    texts = [cst.Module(body=[]).code_for_node(each).strip() for each in (one, other)]
    shapes = [ast.dump(ast.parse(f"({text})", mode="eval")) for text in texts]
    return shapes[0] == shapes[1]


def expression(text: str) -> cst.BaseExpression:
    return cst.parse_expression(text)


def statements(text: str) -> list[cst.BaseStatement]:
    return list(cst.parse_module(text).body)


def free_name(source: SourceFile, wanted: str) -> str:
    """Return a name that the file does not use."""
    used = {each.value for each in walk(source.module) if isinstance(each, cst.Name)}
    name, number = wanted, 2
    while name in used:
        name, number = f"{wanted}_{number}", number + 1
    return name


def with_import(text: str, line: str) -> str:
    """Add an import below those at the top of a text, unless it is there."""
    module = cst.parse_module(text)
    place = 0
    for number, statement in enumerate(module.body):
        small = simple(statement)
        if isinstance(small, (cst.Import, cst.ImportFrom)):
            if module.code_for_node(small).strip() == line:
                return text
            place = number + 1
        elif number == 0 and isinstance(small, cst.Expr):
            place = 1
        elif place < number:
            break
    new = cst.parse_module(line + "\n").body
    return module.with_changes(body=[*module.body[:place], *new, *module.body[place:]]).code
