"""Sequences that a loop builds row by row for each sample, built by one gather.

    for b in range(x.size(0)):                       built = ragged.concat([
        seq = [start]                                    ragged.constant(start),
        for t in range(lengths[b]):             ->       ragged.rows(x + kind, lengths),
            seq.append(x[b, t] + kind)               ])
        sequences.append(torch.cat(seq))

Each statement of the loop becomes a piece: what is the same for all samples a constant, `x[b]` and
`x[b, t]` rows of `x`, an `if` the samples that have the piece.  A second loop that pads the sequences with
zeros, `pad_sequence` and `torch.stack` are what `ragged.concat` returns; for any other reader the sequences
are cut apart again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import libcst as cst

from flatout.tuner.patches.collected import bracketed
from flatout.tuner.patches.padded import Consumer, find_consumer
from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.purity import has_one_row, impure_part, module_kinds
from flatout.tuner.patches.source import (
    Refused,
    Replacement,
    Source,
    appended,
    argument,
    assigned,
    base_name,
    bindings,
    binds_itself,
    call_of,
    changed_names,
    dotted,
    expression,
    free_name,
    is_empty_list,
    method_of,
    names,
    reads,
    simple,
    statements,
    substitute,
    target_names,
    walk,
    with_import,
)

IMPORT = "from flatout.data import ragged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """`for b in range(n)`, `for b, n in enumerate(xs)`, `for row, n in zip(xs, ns)`."""

    text: str  # "for b in range(n)", which heads a comprehension as well
    index: str | None  # the name that counts samples
    rows: dict[str, str]  # names that stand for x[b], and x
    names: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
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

    source: Source
    head: Head
    kinds: dict[str, str]
    outside: set[str]  # names that the loop changes: nothing constant may use them
    sequence: str = ""
    joined: str = ""  # "cat" or "stack"
    result: str = ""  # the list that takes the finished sequences
    pieces: list[Piece] = field(default_factory=list)
    temporaries: dict[str, cst.BaseExpression] = field(default_factory=dict)


def rewrite(source: Source, lines: Sequence[int]) -> str:
    if free_name(source, "ragged") != "ragged" and IMPORT not in source.module.code:
        raise Refused("the file has a name ragged of its own")
    changes: dict[cst.CSTNode, Replacement] = {}
    reason = "no loop here appends to a list that torch.cat or torch.stack joins for each sample"
    for loop in [each for each in walk(source.module) if isinstance(each, cst.For)]:
        if lines and not any(source.holds(loop, line) for line in lines):
            continue
        try:
            changes.update(_rewrite_loop(source, loop))
        except Refused as refusal:
            if not changes and _appends_rows(loop):
                reason = str(refusal)
    if not changes:
        raise Refused(reason)
    return with_import(source.replaced(changes), IMPORT)


def _appends_rows(loop: cst.For) -> bool:
    return any(isinstance(each, cst.For) for each in loop.body.body)


def _rewrite_loop(source: Source, loop: cst.For) -> dict[cst.CSTNode, Replacement]:
    body = _read_loop(source, loop)
    start = _beginning(source, loop, body.result)
    consumed = find_consumer(source, loop, body.result)
    removed = [start, loop, *consumed.removed]
    _check_other_readers(source, loop, removed, body.result, consumed)
    built = free_name(source, "built")
    text = f"{built} = ragged.concat(\n    [\n"
    for piece in body.pieces:
        text += "".join(f"        {line}\n" for line in piece.code(body.head.text).split("\n"))
    text += "    ]\n)\n"
    after = ""
    changes: dict[cst.CSTNode, Replacement] = dict.fromkeys(removed)
    if consumed.whole is None:  # whoever reads them gets a list, as before
        pairs = f"zip({built}.values.unbind(0), {built}.lengths.tolist())"
        after = f"{body.result} = [row[:length] for row, length in {pairs}]\n"
    else:
        changes[consumed.whole] = expression(f"{built}.values")
        after = "".join(f"{name} = {built}.values.size(1)\n" for name in consumed.lengths)
    changes[loop] = _with_leading_lines(statements(text + after), loop)
    return changes


def _with_leading_lines(new: list[cst.BaseStatement], old: cst.For) -> list[cst.CSTNode]:
    first = new[0].with_changes(leading_lines=old.leading_lines)
    return [first, *new[1:]]


# -- the loop over samples


def _read_loop(source: Source, loop: cst.For) -> Body:
    if loop.orelse is not None or loop.asynchronous is not None:
        raise Refused("the loop over samples has an else")
    for each in walk(loop):
        if isinstance(
            each, (cst.Break, cst.Continue, cst.Return, cst.Yield, cst.Await, cst.Raise, cst.With, cst.Try)
        ):
            raise Refused(f"the loop over samples holds a {type(each).__name__.lower()}")
    body = Body(
        source=source,
        head=_read_head(source, loop),
        kinds=module_kinds(source, loop),
        outside=changed_names(loop),
    )
    block = loop.body.body
    first = assigned(block[0]) if block else None
    if first is None or not (is_empty_list(first[1]) or isinstance(first[1], cst.List)):
        raise Refused("the loop over samples does not begin with a list of its own")
    body.sequence = first[0]
    body.joined = _read_end(body, list(block))
    if isinstance(first[1], cst.List):
        for element in first[1].elements:
            body.pieces.append(_piece(body, element.value, ()))
    for statement in block[1:]:
        if not _is_end(body, statement):
            _read_statement(body, statement, ())
    return body


def _read_head(source: Source, loop: cst.For) -> Head:
    target: cst.BaseExpression = loop.target
    iterated = loop.iter
    text = f"for {source.code(target)} in {source.code(iterated)}"
    bound = frozenset(name.value for name in target_names(target))
    called = call_of(iterated)
    index: str | None = None
    rows: dict[str, str] = {}
    inner: cst.BaseExpression = iterated
    if called == "range" and isinstance(iterated, cst.Call):
        if len(iterated.args) != 1 or not isinstance(target, cst.Name):
            raise Refused("the loop over samples does not begin at the first one")
        return Head(text=text, index=target.value, rows={}, names=bound)
    if called == "enumerate" and isinstance(iterated, cst.Call) and len(iterated.args) == 1:
        if not (isinstance(target, cst.Tuple) and len(target.elements) == 2):
            raise Refused("the names that the loop over samples binds cannot be followed")
        counter = target.elements[0].value
        if not isinstance(counter, cst.Name):
            raise Refused("the names that the loop over samples binds cannot be followed")
        index, target, inner = counter.value, target.elements[1].value, iterated.args[0].value
    if call_of(inner) == "zip" and isinstance(inner, cst.Call) and isinstance(target, cst.Tuple):
        plain = [each.value for each in inner.args if each.keyword is None and not each.star]
        pairs = list(zip([each.value for each in target.elements], plain, strict=False))
    else:
        pairs = [(target, inner)]
    for name, value in pairs:
        if isinstance(name, cst.Name) and dotted(value) is not None:
            rows[name.value] = source.code(value)
    return Head(text=text, index=index, rows=rows, names=bound)


def _read_end(body: Body, block: list[cst.BaseStatement] | list[cst.CSTNode]) -> str:
    """`sequences.append(torch.cat(seq, dim=0))`, in one statement or two."""
    last = appended(block[-1])
    if last is None:
        raise Refused("the loop over samples does not end by appending a joined sequence")
    body.result, value = last
    if isinstance(value, cst.Name) and len(block) > 1:
        before = assigned(block[-2])
        if before is not None and before[0] == value.value:
            value = before[1]
    called = call_of(value)
    if called not in ("torch.cat", "torch.concat", "torch.stack") or not isinstance(value, cst.Call):
        raise Refused("the loop over samples does not end by appending a joined sequence")
    joined = argument(value, "tensors", 0)
    if not (isinstance(joined, cst.Name) and joined.value == body.sequence):
        raise Refused("what is joined is not the list that the loop fills")
    axis = argument(value, "dim", 1)
    if axis is not None and not (isinstance(axis, cst.Integer) and axis.value == "0"):
        raise Refused("the rows of a sequence are joined along another axis than the first")
    return "stack" if called == "torch.stack" else "cat"


def _is_end(body: Body, statement: cst.CSTNode) -> bool:
    last = appended(statement)
    if last is not None and last[0] == body.result:
        return True
    made = assigned(statement)
    return made is not None and call_of(made[1]) in ("torch.cat", "torch.concat", "torch.stack")


def _read_statement(body: Body, statement: cst.CSTNode, where: tuple[str, ...]) -> None:
    source = body.source
    if isinstance(statement, cst.If):
        _read_if(body, statement, where)
        return
    if isinstance(statement, cst.For):
        body.pieces.append(_rows_piece(body, statement, where))
        return
    added = appended(statement)
    if added is not None and added[0] == body.sequence:
        body.pieces.append(_piece(body, added[1], where))
        return
    several = _extended(statement, body.sequence)
    if several is not None:
        for value in several:
            body.pieces.append(_piece(body, value, where))
        return
    made = assigned(statement)
    if made is not None and not where and impure_part(made[1], body.kinds) is None:
        if made[0] in body.temporaries or made[0] in body.head.names:
            raise Refused(f"{made[0]} is bound twice in the loop over samples")
        body.temporaries[made[0]] = _inlined(body, made[1])
        return
    small = simple(statement)
    if isinstance(small, cst.Pass):
        return
    raise Refused(f"line {source.line(statement)} does more than append rows: {_short(source, statement)}")


def _read_if(body: Body, statement: cst.If, where: tuple[str, ...]) -> None:
    test = _inlined(body, statement.test)
    if impure_part(test, body.kinds) is not None:
        raise Refused(f"the condition {_short(body.source, statement.test)} may do more than decide")
    _check_host(body, test)
    condition = body.source.code(test)
    _read_block(body, statement.body, (*where, condition))
    other = statement.orelse
    if isinstance(other, cst.Else):
        _read_block(body, other.body, (*where, f"not ({condition})"))
    elif other is not None:
        _read_if(body, other, (*where, f"not ({condition})"))


def _read_block(body: Body, block: cst.BaseSuite, where: tuple[str, ...]) -> None:
    if not isinstance(block, cst.IndentedBlock):
        raise Refused("a block of the loop over samples stands on one line")
    for each in block.body:
        _read_statement(body, each, where)


def _extended(statement: cst.CSTNode, sequence: str) -> list[cst.BaseExpression] | None:
    """The elements of `seq.extend([a, b])` and of `seq += [a, b]`."""
    small = simple(statement)
    value: cst.BaseExpression | None = None
    if (
        isinstance(small, cst.Expr)
        and isinstance(small.value, cst.Call)
        and method_of(small.value) == "extend"
    ):
        owner = small.value.func
        if (
            isinstance(owner, cst.Attribute)
            and dotted(owner.value) == sequence
            and len(small.value.args) == 1
        ):
            value = small.value.args[0].value
    is_sum = isinstance(small, cst.AugAssign) and isinstance(small.operator, cst.AddAssign)
    if is_sum and isinstance(small, cst.AugAssign) and dotted(small.target) == sequence:
        value = small.value
    if not isinstance(value, (cst.List, cst.Tuple)):
        return None
    if any(isinstance(each, cst.StarredElement) for each in value.elements):
        return None
    return [each.value for each in value.elements]


# -- pieces


def _piece(body: Body, value: cst.BaseExpression, where: tuple[str, ...]) -> Piece:
    """One appended value: the same for all samples, or a row of each."""
    value = _inlined(body, value)
    _check_pure(body, value)
    found = _sample_rows(body, value)
    if not found:
        _check_constant(body, value)
        return Piece(kind="constant", value=body.source.code(value), where=where)
    whole = _whole(body, value, found)
    if body.joined == "stack":
        return Piece(kind="each", value=whole, where=where)
    if where:
        raise Refused("rows of a sample that only some samples have: how many there are cannot be seen")
    return Piece(kind="rows", value=whole)


def _rows_piece(body: Body, loop: cst.For, where: tuple[str, ...]) -> Piece:
    """`for t in range(a, b): seq.append(x[b, t] + kind)`."""
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
        last = appended(statement)
        made = assigned(statement)
        if made is not None and impure_part(made[1], body.kinds) is None:
            own[made[0]] = _inlined(replace(body, temporaries={**body.temporaries, **own}), made[1])
        elif last is None or last[0] != body.sequence or statement is not loop.body.body[-1]:
            raise Refused(f"the loop over rows does more than append: {_short(source, statement)}")
    if last is None:
        raise Refused("the loop over rows appends nothing")
    value = _inlined(replace(body, temporaries={**body.temporaries, **own}), last[1])
    _check_pure(body, value)
    bounds = loop.iter
    if call_of(bounds) != "range" or not isinstance(bounds, cst.Call) or not 1 <= len(bounds.args) <= 2:
        raise Refused("the loop over rows does not count them with range")
    limits = [_inlined(body, each.value) for each in bounds.args]
    for limit in limits:
        _check_host(body, limit)
    found = _sample_rows(body, value, row=row)
    if not found:
        raise Refused(f"no row x[b, {row}] is appended in the loop over rows")
    if body.joined == "cat" and not has_one_row(value):
        raise Refused("rows without an axis of their own are joined by torch.cat")
    whole = _whole(body, value, found, row=row)
    texts = [source.code(limit) for limit in limits]
    start = texts[0] if len(texts) == 2 else None
    return Piece(
        kind="rows", value=whole, lengths=f"len(range({', '.join(texts)}))", start=start, where=where
    )


def _inlined(body: Body, value: cst.BaseExpression) -> cst.BaseExpression:
    changes: dict[cst.CSTNode, cst.CSTNode] = {
        name: bracketed(body.temporaries[name.value])
        for name in reads(value)
        if name.value in body.temporaries
    }
    if value in changes:
        return body.temporaries[value.value] if isinstance(value, cst.Name) else value
    inlined: cst.BaseExpression = substitute(value, changes)
    return inlined


def _sample_rows(body: Body, value: cst.CSTNode, *, row: str | None = None) -> dict[cst.CSTNode, str]:
    """The parts `x[b]`, or with `row` `x[b, row]`, of an expression, and x for each."""
    head = body.head
    found: dict[cst.CSTNode, str] = {}
    for each in walk(value):
        if isinstance(each, cst.Subscript):
            owner, indices = each.value, [_index_name(item) for item in each.slice]
            if isinstance(owner, cst.Subscript) and row is not None:  # x[b][t]
                outer = [_index_name(item) for item in owner.slice]
                if outer == [head.index] and head.index and indices == [row] and dotted(owner.value):
                    found[each] = body.source.code(owner.value)
            elif dotted(owner) is not None:
                wanted = [head.index] if row is None else [head.index, row]
                if head.index and indices == wanted:
                    found[each] = body.source.code(owner)
                elif row is not None and indices == [row] and dotted(owner) in head.rows:
                    found[each] = head.rows[dotted(owner) or ""]
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
    """The expression for all samples at once: `x` instead of `x[b]`."""
    owners = set(found.values())
    if len(owners) > 1:
        raise Refused(
            f"{' and '.join(sorted(owners))} meet in one row: that their shapes agree cannot be seen"
        )
    (owner,) = owners
    if base_name(expression(owner)) in body.outside:
        raise Refused(f"{owner} changes inside the loop over samples")
    changes: dict[cst.CSTNode, cst.CSTNode] = {}
    for each in walk(value):  # x[b, t].unsqueeze(0) has one row, of which x has many
        if isinstance(each, cst.Call) and method_of(each) == "unsqueeze" and row is not None:
            inner = each.func.value if isinstance(each.func, cst.Attribute) else None
            if inner in found and body.joined == "cat" and has_one_row(each):
                changes[each] = expression(owner)
    covered = {below for each in changes for below in walk(each)}
    changes.update({each: expression(owner) for each in found if each not in covered})
    whole = changes[value] if value in changes else substitute(value, changes)
    left = names(whole) & (body.head.names | {row or ""})
    if left:
        raise Refused(f"a row depends on {', '.join(sorted(left))} in another way than as an index")
    _check_elementwise(body, value, set(found) | set(changes))
    assert isinstance(whole, cst.BaseExpression)
    if (names(whole) & body.outside) - {base_name(expression(owner))}:
        raise Refused("a row depends on a name that changes inside the loop over samples")
    return body.source.code(whole)


def _check_elementwise(body: Body, value: cst.CSTNode, rows: set[cst.CSTNode]) -> None:
    """Between a row and the whole value stand only operators that treat each row alone."""
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
        and body.kinds.get(dotted(value.func) or "") is not None
    ):
        _check_elementwise(body, value.args[0].value, rows)
        return
    raise Refused(f"what {_short(body.source, value)} does with a row cannot be seen")


def _check_constant(body: Body, value: cst.BaseExpression) -> None:
    used = names(value) & (body.head.names | body.outside)
    if used:
        raise Refused(f"{', '.join(sorted(used))} is used in another way than as an index of rows")
    attributes = {base_name(each) for each in walk(value) if isinstance(each, cst.Attribute)}
    if attributes & body.outside:
        raise Refused(f"{', '.join(sorted(filter(None, attributes & body.outside)))} changes in the loop")


def _check_pure(body: Body, value: cst.BaseExpression) -> None:
    part = impure_part(value, body.kinds)
    if part is not None:
        raise Refused(
            f"{_short(body.source, part)} in line {_line(body, part)} may give something else each time"
            if _line(body, part)
            else f"{_short(body.source, part)} may give something else each time"
        )


def _line(body: Body, part: cst.CSTNode) -> int | None:
    try:
        return body.source.line(part)
    except KeyError:  # a part that was put together here
        return None


def _check_host(body: Body, value: cst.CSTNode) -> None:
    """A condition or a bound may use the names of the loop's head and what the loop leaves alone."""
    changing = names(value) & (body.outside - body.head.names)
    if changing or impure_part(value, body.kinds) is not None:
        raise Refused(f"{_short(body.source, value)} may change inside the loop over samples")


def _short(source: Source, node: cst.CSTNode) -> str:
    text = " ".join(source.code(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- around the loop


def _beginning(source: Source, loop: cst.For, name: str) -> cst.CSTNode:
    block = source.block(loop)
    before = [each for each in block[: block.index(loop)] if (assigned(each) or ("",))[0] == name]
    if not before or not is_empty_list((assigned(before[-1]) or ("", cst.Name("x")))[1]):
        raise Refused(f"{name} is not made empty beside the loop over samples")
    return before[-1]


def _check_other_readers(
    source: Source, loop: cst.For, removed: Sequence[cst.CSTNode], result: str, consumed: Consumer
) -> None:
    """What the removed statements bind must not be read by others."""
    scope = source.scope(loop)
    bound = {name.value for node in removed for name in bindings(node)} - set(consumed.lengths)
    if consumed.whole is None:
        bound -= {result}
    inside = {below for node in removed for below in walk(node)}
    if consumed.whole is not None:
        inside |= set(walk(consumed.whole))
    for each in walk(scope.body if isinstance(scope, cst.FunctionDef) else scope):
        if isinstance(each, (cst.Global, cst.Nonlocal)) and {item.name.value for item in each.names} & bound:
            raise Refused("names of the loop are shared with other functions")
    for name in reads(scope):
        if name.value in bound and name not in inside and not binds_itself(source, name, scope):
            raise Refused(f"{name.value} is read again in line {source.line(name)}")


PATCH = Patch(
    rewrite,
    "build the sequences of all samples by one gather instead of row by row",
    safety="reordered",
    answers=("FO302", "FO301"),
)
