"""What a loop over samples appends, as pieces of `flatout.data.ragged`.

A value that is the same for all samples is a constant; `x[b]` is one row per sample, and a loop over `x[b,
t]` gives as many rows as it counts.  `piece_of` and `rows_piece` refuse everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from flatout.tuner.patches.joined_lists import inline_names
from flatout.tuner.patches.purity import has_one_row, impure_part
from flatout.tuner.patches.source import Refused, SourceFile, expression, substitute
from flatout.tuner.patches.syntax import (
    base_name,
    call_of,
    dotted_name,
    method_of,
    names,
    read_append,
    read_assignment,
    walk,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """`for b in range(n)`, `for b, n in enumerate(xs)`, `for row, n in zip(xs, ns)`."""

    text: str  # "for b in range(n)", which also heads a comprehension
    index: str | None  # the name that counts samples
    rows: dict[str, str]  # names that stand for x[b], mapped to x
    names: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedPiece:
    """One `ragged` piece, as text."""

    kind: str  # "constant", "rows", "each"
    value: str
    lengths: str | None = None  # of one sample
    start: str | None = None
    where: tuple[str, ...] = ()  # conditions of one sample, all of which hold

    def code(self, head: str) -> str:
        where = " and ".join(f"({each})" if len(self.where) > 1 else each for each in self.where)
        lines = [f"{self.value},"]
        if self.kind == "rows" and self.lengths is not None:
            lengths = f"{self.lengths} if {where} else 0" if where else self.lengths
            lines.append(f"[{lengths} {head}],")
            if self.start is not None and self.start != "0":
                lines.append(f"start=[int({self.start}) {head}],")
        elif where:
            lines.append(f"where=[bool({where}) {head}],")
        if len(lines) == 1:
            return f"ragged.{self.kind}({self.value}),"
        return f"ragged.{self.kind}(\n" + "".join(f"    {line}\n" for line in lines) + "),"


@dataclass(kw_only=True, slots=True)
class Body:
    """What is known while the statements of a loop are read."""

    source: SourceFile
    head: Head
    kinds: dict[str, str]
    outside: set[str]  # names that the loop changes: no constant may use them
    sequence: str = ""
    joined: str = ""  # "cat" or "stack"
    result: str = ""  # the list that receives the finished sequences
    pieces: list[RaggedPiece] = field(default_factory=list)
    temporaries: dict[str, cst.BaseExpression] = field(default_factory=dict)


def piece_of(body: Body, value: cst.BaseExpression, where: tuple[str, ...]) -> RaggedPiece:
    """Read one appended value: the same for all samples, or a row of each."""
    value = inline_names(value, body.temporaries)
    _check_pure(body, value)
    found = _sample_rows(body, value)
    if not found:
        _check_constant(body, value)
        return RaggedPiece(kind="constant", value=body.source.code(value), where=where)
    whole = _whole(body, value, found)
    if body.joined == "stack":
        return RaggedPiece(kind="each", value=whole, where=where)
    if where:
        raise Refused("only some samples have these rows, so their number is unknown")
    return RaggedPiece(kind="rows", value=whole)


def rows_piece(body: Body, loop: cst.For, where: tuple[str, ...]) -> RaggedPiece:
    """Read `for t in range(a, b): seq.append(x[b, t] + kind)`."""
    source = body.source
    if (
        loop.orelse is not None
        or not isinstance(loop.target, cst.Name)
        or not isinstance(loop.body, cst.IndentedBlock)
    ):
        raise Refused("the loop over rows binds more than one name")
    row = loop.target.value
    last = None
    own: dict[str, cst.BaseExpression] = {}
    for statement in loop.body.body:
        last = read_append(statement)
        made = read_assignment(statement)
        if made is not None and impure_part(made[1], body.kinds) is None:
            own[made[0]] = inline_names(made[1], {**body.temporaries, **own})
        elif last is None or last[0] != body.sequence or statement is not loop.body.body[-1]:
            raise Refused(f"the loop over rows does more than append: {short(source, statement)}")
    if last is None:
        raise Refused("the loop over rows appends nothing")
    value = inline_names(last[1], {**body.temporaries, **own})
    _check_pure(body, value)
    bounds = loop.iter
    if call_of(bounds) != "range" or not isinstance(bounds, cst.Call) or not 1 <= len(bounds.args) <= 2:
        raise Refused("the loop over rows does not count them with range")
    limits = [inline_names(each.value, body.temporaries) for each in bounds.args]
    for limit in limits:
        check_host(body, limit)
    found = _sample_rows(body, value, row=row)
    if not found:
        raise Refused(f"no row x[b, {row}] is appended in the loop over rows")
    if body.joined == "cat" and not has_one_row(value):
        raise Refused("torch.cat joins rows that have no axis of their own")
    whole = _whole(body, value, found, row=row)
    texts = [source.code(limit) for limit in limits]
    start = texts[0] if len(texts) == 2 else None
    return RaggedPiece(
        kind="rows", value=whole, lengths=f"len(range({', '.join(texts)}))", start=start, where=where
    )


def _sample_rows(body: Body, value: cst.CSTNode, *, row: str | None = None) -> dict[cst.CSTNode, str]:
    """Find the parts `x[b]` of an expression, or `x[b, row]` with `row`, and x for each."""
    head = body.head
    found: dict[cst.CSTNode, str] = {}
    for each in walk(value):
        if isinstance(each, cst.Subscript):
            owner, indices = each.value, [_index_name(item) for item in each.slice]
            if isinstance(owner, cst.Subscript) and row is not None:  # x[b][t]
                outer = [_index_name(item) for item in owner.slice]
                if outer == [head.index] and head.index and indices == [row] and dotted_name(owner.value):
                    found[each] = body.source.code(owner.value)
            elif dotted_name(owner) is not None:
                wanted = [head.index] if row is None else [head.index, row]
                if head.index and indices == wanted:
                    found[each] = body.source.code(owner)
                elif row is not None and indices == [row] and dotted_name(owner) in head.rows:
                    found[each] = head.rows[dotted_name(owner) or ""]
        elif isinstance(each, cst.Name) and row is None and each.value in head.rows:
            found[each] = head.rows[each.value]
    inside = {below for each in found for below in walk(each) if below is not each}
    return {each: owner for each, owner in found.items() if each not in inside}


def _index_name(item: cst.SubscriptElement) -> str | None:
    inner = item.slice
    return inner.value.value if isinstance(inner, cst.Index) and isinstance(inner.value, cst.Name) else None


def _whole(
    body: Body, value: cst.BaseExpression, found: dict[cst.CSTNode, str], *, row: str | None = None
) -> str:
    """Return the expression for all samples at once: `x` instead of `x[b]`."""
    owners = set(found.values())
    if len(owners) > 1:
        raise Refused(f"{' and '.join(sorted(owners))} are combined in one row, and their shapes may differ")
    (owner,) = owners
    if base_name(expression(owner)) in body.outside:
        raise Refused(f"{owner} changes inside the loop over samples")
    changes: dict[cst.CSTNode, cst.CSTNode] = {}
    for each in walk(value):  # x[b, t].unsqueeze(0) has one row where x has many
        if isinstance(each, cst.Call) and method_of(each) == "unsqueeze" and row is not None:
            inner = each.func.value if isinstance(each.func, cst.Attribute) else None
            if inner in found and body.joined == "cat" and has_one_row(each):
                changes[each] = expression(owner)
    covered = {below for each in changes for below in walk(each)}
    changes.update({each: expression(owner) for each in found if each not in covered})
    whole = changes[value] if value in changes else substitute(value, changes)
    left = names(whole) & (body.head.names | {row or ""})
    if left:
        raise Refused(f"a row depends on {', '.join(sorted(left))}, but not as an index")
    _check_elementwise(body, value, set(found) | set(changes))
    assert isinstance(whole, cst.BaseExpression)
    if (names(whole) & body.outside) - {base_name(expression(owner))}:
        raise Refused("a row depends on a name that changes inside the loop over samples")
    return body.source.code(whole)


def _check_elementwise(body: Body, value: cst.CSTNode, rows: set[cst.CSTNode]) -> None:
    """Require that only operators that treat each row alone act on a row."""
    if value in rows:
        return
    if isinstance(value, cst.BinaryOperation):
        if isinstance(value.operator, cst.MatrixMultiply):
            raise Refused("a row is multiplied as a matrix")
        for side in (value.left, value.right):
            if any(each in rows for each in walk(side)):
                _check_elementwise(body, side, rows)
        return
    if isinstance(value, cst.UnaryOperation):
        _check_elementwise(body, value.expression, rows)
        return
    if (
        isinstance(value, cst.Call)
        and len(value.args) == 1
        and body.kinds.get(dotted_name(value.func) or "") is not None
    ):
        _check_elementwise(body, value.args[0].value, rows)
        return
    raise Refused(f"the effect of {short(body.source, value)} on a row is unknown")


def _check_constant(body: Body, value: cst.BaseExpression) -> None:
    used = names(value) & (body.head.names | body.outside)
    if used:
        raise Refused(f"{', '.join(sorted(used))} is not only used as a row index")
    attributes = {base_name(each) for each in walk(value) if isinstance(each, cst.Attribute)}
    if attributes & body.outside:
        raise Refused(f"{', '.join(sorted(filter(None, attributes & body.outside)))} changes in the loop")


def _check_pure(body: Body, value: cst.BaseExpression) -> None:
    part = impure_part(value, body.kinds)
    if part is not None:
        raise Refused(
            f"{short(body.source, part)} in line {_line(body, part)} may give another value each time"
            if _line(body, part)
            else f"{short(body.source, part)} may give another value each time"
        )


def _line(body: Body, part: cst.CSTNode) -> int | None:
    try:
        return body.source.line(part)
    except KeyError:  # a part that was assembled here
        return None


def check_host(body: Body, value: cst.CSTNode) -> None:
    """Require that a condition or bound uses only names of the loop's head and names that stay the same."""
    changing = names(value) & (body.outside - body.head.names)
    if changing or impure_part(value, body.kinds) is not None:
        raise Refused(f"{short(body.source, value)} may change inside the loop over samples")


def short(source: SourceFile, node: cst.CSTNode) -> str:
    text = " ".join(source.code(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
