"""A file of the user's as a tree that keeps every space, and what can be seen in it without running it.

Nothing here knows types.  A name is followed inside one function; what cannot be followed is refused by those
who ask.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

Scope = cst.FunctionDef | cst.Module
Loop = cst.For | cst.While
Replacement = cst.CSTNode | Sequence[cst.CSTNode] | None  # None removes the node


class Refused(Exception):
    """Why a patch leaves a file alone, as a sentence without its full stop."""


class Source:
    """The tree of one file."""

    def __init__(self, text: str) -> None:
        try:
            wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        except cst.ParserSyntaxError:
            raise Refused("the file is not Python that can be read") from None
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
        """The function that a node stands in, or the module."""
        return next(each for each in self.ancestors(node) if isinstance(each, (cst.FunctionDef, cst.Module)))

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        return next((each for each in self.ancestors(node) if isinstance(each, cst.ClassDef)), None)

    def loops_around(self, node: cst.CSTNode) -> list[Loop]:
        """Loops of the same function, the innermost first."""
        found: list[Loop] = []
        for above in self.ancestors(node):
            if isinstance(above, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
                break
            if isinstance(above, (cst.For, cst.While)):
                found.append(above)
        return found

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The statement that a node is part of: the smallest that stands in a block of its own."""
        found = node
        while not isinstance(self.parent(found), (cst.IndentedBlock, cst.Module)):
            above = self.parent(found)
            assert above is not None
            found = above
        return found

    def block(self, statement: cst.CSTNode) -> Sequence[cst.BaseStatement]:
        """The statements among which a statement stands."""
        above = self.parent(statement)
        assert isinstance(above, (cst.IndentedBlock, cst.Module))
        return list(above.body)

    def replaced(
        self,
        changes: Mapping[cst.CSTNode, Replacement],
        *,
        before: Mapping[cst.CSTNode, Sequence[cst.BaseStatement]] | None = None,
    ) -> str:
        """The text with some nodes replaced, and statements put before others."""
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
    """A copy of an expression with some of its parts replaced."""
    return node.visit(_Replace(changes, {}))


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all below it."""
    yield node
    for child in node.children:
        yield from walk(child)


def reads(node: cst.CSTNode) -> list[cst.Name]:
    """Names used in a node, which includes those it binds; attributes and keywords are none."""
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
    """The plain names that an assignment target binds."""
    if isinstance(target, cst.Name):
        return [target]
    if isinstance(target, (cst.Tuple, cst.List)):
        return [name for element in target.elements for name in target_names(element.value)]
    if isinstance(target, cst.StarredElement):
        return target_names(target.value)
    return []


def bindings(node: cst.CSTNode) -> list[cst.Name]:
    """The names that a node binds, in nested statements too."""
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
    """Names that a node binds, writes into, or calls a method on that changes its object."""
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
    """`x` of `x`, `x[i]`, `x.y[j]`, `x.y(...)`; of `self.x` and below it `self.x`."""
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


def dotted(node: cst.CSTNode) -> str | None:
    """`torch.nn.functional.pad` as text; None for anything but names and dots."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        left = dotted(node.value)
        return None if left is None else f"{left}.{node.attr.value}"
    return None


def call_of(node: cst.CSTNode | None) -> str | None:
    """The dotted name of what a call calls."""
    return dotted(node.func) if isinstance(node, cst.Call) else None


def method_of(node: cst.CSTNode | None) -> str | None:
    """The last name of what a call calls: `item` of `loss.mean().item()`."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.attr.value
    return None


def argument(call: cst.Call, name: str, place: int | None = None) -> cst.BaseExpression | None:
    """An argument by its keyword or its place."""
    for number, each in enumerate(call.args):
        if each.star:
            continue
        if (each.keyword is not None and each.keyword.value == name) or (
            each.keyword is None and number == place
        ):
            return each.value
    return None


def simple(statement: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """The one small statement of a line; None for blocks and for lines with several."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        return statement.body[0]
    return None


def assigned(statement: cst.CSTNode) -> tuple[str, cst.BaseExpression] | None:
    """(name, value) of `name = value`."""
    small = simple(statement)
    if isinstance(small, cst.Assign) and len(small.targets) == 1:
        target = small.targets[0].target
        if isinstance(target, cst.Name):
            return target.value, small.value
    if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name) and small.value is not None:
        return small.target.value, small.value
    return None


def appended(statement: cst.CSTNode) -> tuple[str, cst.BaseExpression] | None:
    """(name, value) of `name.append(value)`."""
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


def binds_itself(source: Source, name: cst.Name, scope: cst.CSTNode) -> bool:
    """Whether a name is a target, or stands in a loop, comprehension or function that binds it anew."""
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
    """Whether two expressions are the same but for spaces."""
    texts = [cst.Module(body=[]).code_for_node(each).strip() for each in (one, other)]
    shapes = [ast.dump(ast.parse(f"({text})", mode="eval")) for text in texts]
    return shapes[0] == shapes[1]


def expression(text: str) -> cst.BaseExpression:
    return cst.parse_expression(text)


def statements(text: str) -> list[cst.BaseStatement]:
    return list(cst.parse_module(text).body)


def free_name(source: Source, wanted: str) -> str:
    """A name that the file does not use."""
    used = {each.value for each in walk(source.module) if isinstance(each, cst.Name)}
    name, number = wanted, 2
    while name in used:
        name, number = f"{wanted}_{number}", number + 1
    return name


def with_import(text: str, line: str) -> str:
    """The text with an import below those that stand at its top; unchanged where it has it."""
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
