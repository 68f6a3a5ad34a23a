"""Find loops and comprehensions that only fill a list that one `torch.stack` or `torch.cat` joins.

rows = []                                                 [x[i, n - 1] for i, n in enumerate(lengths)]
for i, n in enumerate(lengths):                 both:     clauses, element, and the call that joins them
    last = n - 1
    rows.append(x[i, last])
torch.stack(rows)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from flatout.tuner.patches.purity import impure_part
from flatout.tuner.patches.source import Refused, Replacement, SourceFile, binds_itself, substitute
from flatout.tuner.patches.syntax import (
    argument,
    bindings,
    call_of,
    dotted_name,
    is_empty_list,
    is_zero,
    read_append,
    read_assignment,
    reads,
    target_names,
    walk,
)

JOINS = {"torch.stack": "stack", "torch.cat": "cat", "torch.concat": "cat"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedList:
    """One list and its join."""

    clauses: str  # "for a in b for c in a"
    names: frozenset[str]  # names that the clauses bind
    changed: frozenset[str]  # names that the loop binds
    element: cst.BaseExpression
    call: cst.Call  # torch.stack(...) or torch.cat(...)
    joined: str  # "stack" or "cat"
    removed: tuple[cst.CSTNode, ...]  # statements that the join makes needless
    lines: tuple[int, int]


def rewrite_joined_lists(
    source: SourceFile,
    lines: Sequence[int],
    one: Callable[[SourceFile, JoinedList], cst.BaseExpression],
    *,
    kinds: dict[str, str],
    otherwise: str,
) -> str:
    """Replace each list by what `one` makes of it; `otherwise` is the reason if there is no list."""
    changes: dict[cst.CSTNode, Replacement] = {}
    reason = otherwise
    for found in find_joined_lists(source, lines, kinds):
        if isinstance(found, str):
            reason = found
            continue
        try:
            changes[found.call] = one(source, found)
        except Refused as refusal:
            reason = str(refusal)
            continue
        changes.update(dict.fromkeys(found.removed))
    if not changes:
        raise Refused(reason)
    return source.replaced(changes)


def find_joined_lists(
    source: SourceFile, lines: Sequence[int], kinds: dict[str, str]
) -> Iterator[JoinedList | str]:
    """Yield every such list that touches the lines (no lines: anywhere), or the reason to skip one."""
    for call in [each for each in walk(source.module) if isinstance(each, cst.Call)]:
        joined = JOINS.get(call_of(call) or "")
        values = argument(call, "tensors", 0)
        axis = argument(call, "dim", 1)
        if joined is None or values is None:
            continue
        if axis is not None and not is_zero(axis):
            continue
        try:
            found = _of_call(source, call, joined, values, kinds)
        except Refused as refusal:
            yield str(refusal)
            continue
        if found is not None and (
            not lines or any(found.lines[0] <= each <= found.lines[1] for each in lines)
        ):
            yield found


def _of_call(
    source: SourceFile, call: cst.Call, joined: str, values: cst.BaseExpression, kinds: dict[str, str]
) -> JoinedList | None:
    if isinstance(values, (cst.ListComp, cst.GeneratorExp)):
        clauses, names = _clauses(source, values.for_in)
        return JoinedList(
            clauses=clauses,
            names=frozenset(names),
            changed=frozenset(names),
            element=values.elt,
            call=call,
            joined=joined,
            removed=(),
            lines=(source.line(call), source.last_line(call)),
        )
    return _of_loop(source, call, joined, values.value, kinds) if isinstance(values, cst.Name) else None


def _clauses(source: SourceFile, clause: cst.CompFor) -> tuple[str, set[str]]:
    if clause.asynchronous is not None or clause.ifs:
        raise Refused("the list is filled under a condition")
    text = f"for {source.code(clause.target)} in {source.code(clause.iter)}"
    names = {each.value for each in target_names(clause.target)}
    if clause.inner_for_in is not None:
        more, inner = _clauses(source, clause.inner_for_in)
        return f"{text} {more}", names | inner
    return text, names


def _of_loop(
    source: SourceFile, call: cst.Call, joined: str, name: str, kinds: dict[str, str]
) -> JoinedList | None:
    statement = source.statement(call)
    block = source.block(statement)
    before = block[: block.index(statement)]
    start = next((each for each in reversed(before) if (read_assignment(each) or ("",))[0] == name), None)
    made = read_assignment(start) if start is not None else None
    if start is None or made is None or not is_empty_list(made[1]):
        return None
    fills = [
        each for each in before[before.index(start) + 1 :] if name in {word.value for word in reads(each)}
    ]
    if len(fills) != 1 or not isinstance(fills[0], cst.For):
        return None
    loop = fills[0]
    clauses, names, element = _of_body(source, loop, name, kinds)
    inside = {below for node in (start, loop, call) for below in walk(node)}
    bound = {each.value for each in bindings(loop)} | {name}
    scope = source.scope(loop)
    for each in reads(scope):
        if each.value in bound and each not in inside and not binds_itself(source, each, scope):
            raise Refused(f"{each.value} is read again in line {source.line(each)}")
    return JoinedList(
        clauses=clauses,
        names=frozenset(names),
        changed=frozenset(bound),
        element=element,
        call=call,
        joined=joined,
        removed=(start, loop),
        lines=(source.line(loop), source.last_line(loop)),
    )


def _of_body(
    source: SourceFile, loop: cst.For, name: str, kinds: dict[str, str]
) -> tuple[str, set[str], cst.BaseExpression]:
    """Read clauses, their names and the element of a loop whose body holds temporaries and one append."""
    if (
        loop.orelse is not None
        or loop.asynchronous is not None
        or not isinstance(loop.body, cst.IndentedBlock)
    ):
        raise Refused("the loop that fills the list has an else")
    text = f"for {source.code(loop.target)} in {source.code(loop.iter)}"
    names = {each.value for each in target_names(loop.target)}
    block = loop.body.body
    if len(block) == 1 and isinstance(block[0], cst.For):
        more, inner, element = _of_body(source, block[0], name, kinds)
        return f"{text} {more}", names | inner, element
    known: dict[str, cst.BaseExpression] = {}
    for statement in block[:-1]:
        made = read_assignment(statement)
        if made is None or made[0] in known or made[0] in names or impure_part(made[1], kinds) is not None:
            raise Refused(f"line {source.line(statement)} does more than fill the list")
        known[made[0]] = inline_names(made[1], known)
    last = read_append(block[-1])
    if last is None or last[0] != name:
        raise Refused(f"line {source.line(block[-1])} does more than fill the list")
    return text, names, inline_names(last[1], known)


def inline_names(value: cst.BaseExpression, known: dict[str, cst.BaseExpression]) -> cst.BaseExpression:
    """Return the value with known names replaced by their values."""
    if isinstance(value, cst.Name):
        return known.get(value.value, value)
    new: cst.BaseExpression = substitute(
        value, {each: parenthesise(known[each.value]) for each in reads(value) if each.value in known}
    )
    return new


def parenthesise(value: cst.BaseExpression) -> cst.BaseExpression:
    """Parenthesise a value if an operator beside it could split it."""
    operators = (cst.BinaryOperation, cst.Comparison, cst.UnaryOperation, cst.IfExp, cst.BooleanOperation)
    if isinstance(value, operators) and not value.lpar:
        return value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return value


def index_parts(node: cst.CSTNode) -> tuple[str, list[cst.BaseExpression]] | None:
    """Return (x, [i, j]) of `x[i, j]` or `x[i][j]`; None if an index is a slice or x is not a name."""
    parts: list[cst.BaseExpression] = []
    while isinstance(node, cst.Subscript):
        own = []
        for item in node.slice:
            if not isinstance(item.slice, cst.Index) or item.slice.star:
                return None
            own.append(item.slice.value)
        parts = own + parts
        node = node.value
    owner = dotted_name(node)
    return (owner, parts) if owner is not None and parts else None
