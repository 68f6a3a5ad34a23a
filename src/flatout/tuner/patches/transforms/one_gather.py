"""Build sequences by one gather, instead of row by row for each sample.

    for b in range(x.size(0)):                       built = ragged.concat([
        seq = [start]                                    ragged.constant(start),
        for t in range(lengths[b]):             ->       ragged.rows(x + kind, lengths),
            seq.append(x[b, t] + kind)               ])
        sequences.append(torch.cat(seq))

Each statement of the loop becomes a piece: a value that is the same for all samples becomes a constant,
`x[b]` and `x[b, t]` become rows of `x`, and an `if` selects the samples that have the piece.  `ragged.concat`
replaces a second loop that pads the sequences with zeros, `pad_sequence` and `torch.stack`; any other reader
gets the sequences cut apart again.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.joined_lists import inline_names
from flatout.tuner.patches.padded_lists import Consumer, find_consumer
from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.purity import impure_part, module_kinds
from flatout.tuner.patches.ragged_pieces import Body, Head, check_host, piece_of, rows_piece, short
from flatout.tuner.patches.source import (
    Refused,
    Replacement,
    SourceFile,
    binds_itself,
    expression,
    free_name,
    statements,
    with_import,
)
from flatout.tuner.patches.syntax import (
    argument,
    bindings,
    call_of,
    changed_names,
    dotted_name,
    is_empty_list,
    is_zero,
    method_of,
    read_append,
    read_assignment,
    reads,
    simple,
    target_names,
    walk,
)

IMPORT = "from flatout.data import ragged"


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    if free_name(source, "ragged") != "ragged" and IMPORT not in source.module.code:
        raise Refused("the file already uses the name ragged")
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


def _rewrite_loop(source: SourceFile, loop: cst.For) -> dict[cst.CSTNode, Replacement]:
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
    if consumed.whole is None:  # other readers get a list, as before
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


def _read_loop(source: SourceFile, loop: cst.For) -> Body:
    if loop.orelse is not None or loop.asynchronous is not None:
        raise Refused("the loop over samples has an else")
    for each in walk(loop):
        if isinstance(
            each, (cst.Break, cst.Continue, cst.Return, cst.Yield, cst.Await, cst.Raise, cst.With, cst.Try)
        ):
            raise Refused(f"the loop over samples contains a {type(each).__name__.lower()}")
    body = Body(
        source=source,
        head=_read_head(source, loop),
        kinds=module_kinds(source, loop),
        outside=changed_names(loop),
    )
    block = loop.body.body
    first = read_assignment(block[0]) if block else None
    if first is None or not (is_empty_list(first[1]) or isinstance(first[1], cst.List)):
        raise Refused("the loop over samples does not start with a new list")
    body.sequence = first[0]
    body.joined = _read_end(body, list(block))
    if isinstance(first[1], cst.List):
        for element in first[1].elements:
            body.pieces.append(piece_of(body, element.value, ()))
    for statement in block[1:]:
        if not _is_end(body, statement):
            _read_statement(body, statement, ())
    return body


def _read_head(source: SourceFile, loop: cst.For) -> Head:
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
            raise Refused("the loop over samples does not start at the first one")
        return Head(text=text, index=target.value, rows={}, names=bound)
    if called == "enumerate" and isinstance(iterated, cst.Call) and len(iterated.args) == 1:
        if not (isinstance(target, cst.Tuple) and len(target.elements) == 2):
            raise Refused("the names that the loop over samples binds cannot be traced")
        counter = target.elements[0].value
        if not isinstance(counter, cst.Name):
            raise Refused("the names that the loop over samples binds cannot be traced")
        index, target, inner = counter.value, target.elements[1].value, iterated.args[0].value
    if call_of(inner) == "zip" and isinstance(inner, cst.Call) and isinstance(target, cst.Tuple):
        plain = [each.value for each in inner.args if each.keyword is None and not each.star]
        pairs = list(zip([each.value for each in target.elements], plain, strict=False))
    else:
        pairs = [(target, inner)]
    for name, value in pairs:
        if isinstance(name, cst.Name) and dotted_name(value) is not None:
            rows[name.value] = source.code(value)
    return Head(text=text, index=index, rows=rows, names=bound)


def _read_end(body: Body, block: list[cst.BaseStatement] | list[cst.CSTNode]) -> str:
    """Read `sequences.append(torch.cat(seq, dim=0))`, in one statement or two."""
    last = read_append(block[-1])
    if last is None:
        raise Refused("the loop over samples does not end by appending a joined sequence")
    body.result, value = last
    if isinstance(value, cst.Name) and len(block) > 1:
        before = read_assignment(block[-2])
        if before is not None and before[0] == value.value:
            value = before[1]
    called = call_of(value)
    if called not in ("torch.cat", "torch.concat", "torch.stack") or not isinstance(value, cst.Call):
        raise Refused("the loop over samples does not end by appending a joined sequence")
    joined = argument(value, "tensors", 0)
    if not (isinstance(joined, cst.Name) and joined.value == body.sequence):
        raise Refused("the joined list is not the one that the loop fills")
    axis = argument(value, "dim", 1)
    if axis is not None and not is_zero(axis):
        raise Refused("the rows of a sequence are not joined along the first axis")
    return "stack" if called == "torch.stack" else "cat"


def _is_end(body: Body, statement: cst.CSTNode) -> bool:
    last = read_append(statement)
    if last is not None and last[0] == body.result:
        return True
    made = read_assignment(statement)
    return made is not None and call_of(made[1]) in ("torch.cat", "torch.concat", "torch.stack")


def _read_statement(body: Body, statement: cst.CSTNode, where: tuple[str, ...]) -> None:
    source = body.source
    if isinstance(statement, cst.If):
        _read_if(body, statement, where)
        return
    if isinstance(statement, cst.For):
        body.pieces.append(rows_piece(body, statement, where))
        return
    added = read_append(statement)
    if added is not None and added[0] == body.sequence:
        body.pieces.append(piece_of(body, added[1], where))
        return
    several = _extended(statement, body.sequence)
    if several is not None:
        for value in several:
            body.pieces.append(piece_of(body, value, where))
        return
    made = read_assignment(statement)
    if made is not None and not where and impure_part(made[1], body.kinds) is None:
        if made[0] in body.temporaries or made[0] in body.head.names:
            raise Refused(f"{made[0]} is bound twice in the loop over samples")
        body.temporaries[made[0]] = inline_names(made[1], body.temporaries)
        return
    small = simple(statement)
    if isinstance(small, cst.Pass):
        return
    raise Refused(f"line {source.line(statement)} does more than append rows: {short(source, statement)}")


def _read_if(body: Body, statement: cst.If, where: tuple[str, ...]) -> None:
    test = inline_names(statement.test, body.temporaries)
    if impure_part(test, body.kinds) is not None:
        raise Refused(f"the condition {short(body.source, statement.test)} may have side effects")
    check_host(body, test)
    condition = body.source.code(test)
    _read_block(body, statement.body, (*where, condition))
    other = statement.orelse
    if isinstance(other, cst.Else):
        _read_block(body, other.body, (*where, f"not ({condition})"))
    elif other is not None:
        _read_if(body, other, (*where, f"not ({condition})"))


def _read_block(body: Body, block: cst.BaseSuite, where: tuple[str, ...]) -> None:
    if not isinstance(block, cst.IndentedBlock):
        raise Refused("a block of the loop over samples is on one line")
    for each in block.body:
        _read_statement(body, each, where)


def _extended(statement: cst.CSTNode, sequence: str) -> list[cst.BaseExpression] | None:
    """Return the elements of `seq.extend([a, b])` or `seq += [a, b]`."""
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
            and dotted_name(owner.value) == sequence
            and len(small.value.args) == 1
        ):
            value = small.value.args[0].value
    is_sum = isinstance(small, cst.AugAssign) and isinstance(small.operator, cst.AddAssign)
    if is_sum and isinstance(small, cst.AugAssign) and dotted_name(small.target) == sequence:
        value = small.value
    if not isinstance(value, (cst.List, cst.Tuple)):
        return None
    if any(isinstance(each, cst.StarredElement) for each in value.elements):
        return None
    return [each.value for each in value.elements]


# -- around the loop


def _beginning(source: SourceFile, loop: cst.For, name: str) -> cst.CSTNode:
    block = source.block(loop)
    before = [each for each in block[: block.index(loop)] if (read_assignment(each) or ("",))[0] == name]
    if not before or not is_empty_list((read_assignment(before[-1]) or ("", cst.Name("x")))[1]):
        raise Refused(f"{name} is not created empty beside the loop over samples")
    return before[-1]


def _check_other_readers(
    source: SourceFile, loop: cst.For, removed: Sequence[cst.CSTNode], result: str, consumed: Consumer
) -> None:
    """Require that no other code reads what the removed statements bind."""
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
