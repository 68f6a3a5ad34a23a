"""Find who reads a list of sequences, and whether it pads them with zeros to the longest and stacks them.

    longest = max(s.size(0) for s in sequences)
    for s in sequences:                                                     torch.stack(padded)
        padded.append(F.pad(s, (0, 0, 0, longest - s.size(0))))

The same with `torch.cat` and `torch.zeros`, as `pad_sequence`, or without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from flatout.tuner.patches.source import SourceFile, expression, same, substitute
from flatout.tuner.patches.syntax import (
    argument,
    call_of,
    dotted_name,
    is_empty_list,
    is_zero,
    read_append,
    read_assignment,
    reads,
    walk,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumer:
    """The code that reads the finished sequences."""

    removed: tuple[cst.CSTNode, ...] = ()
    whole: cst.CSTNode | None = None  # an expression that gives all sequences, padded
    lengths: tuple[str, ...] = ()  # names of the longest length that other code reads


def find_consumer(source: SourceFile, loop: cst.For, name: str) -> Consumer:
    block = source.block(loop)
    rest = list(block[block.index(loop) + 1 :])
    padded = _padding_loop(source, rest, name)
    if padded is not None:
        return padded
    calls = _whole_calls(rest, name)
    if len(calls) == 1 and _num_reads(rest, name) == 1:
        return Consumer(whole=calls[0])
    return Consumer()


def _whole_calls(rest: Sequence[cst.CSTNode], name: str) -> list[cst.Call]:
    """Return calls that make one padded tensor of a list of sequences."""
    found = []
    for statement in rest:
        for each in walk(statement):
            if not isinstance(each, cst.Call) or not each.args or dotted_name(each.args[0].value) != name:
                continue
            called = (call_of(each) or "").rpartition(".")[2]
            if called == "stack" and argument(each, "dim", 1) is None:
                found.append(each)
            first = argument(each, "batch_first", 1)
            if (
                called == "pad_sequence"
                and first is not None
                and dotted_name(first) == "True"
                and len(each.args) == 2
            ):
                found.append(each)
    return found


def _num_reads(rest: Sequence[cst.CSTNode], name: str) -> int:
    return sum(each.value == name for statement in rest for each in reads(statement))


def _padding_loop(source: SourceFile, rest: Sequence[cst.CSTNode], name: str) -> Consumer | None:
    """Match a maximum of lengths, an empty list, a loop that pads each with zeros, and torch.stack."""
    longest: tuple[cst.CSTNode, str] | None = None
    made: dict[str, cst.CSTNode] = {}
    for number, statement in enumerate(rest):
        bound = read_assignment(statement)
        if bound is not None and _is_longest(bound[1], name):
            longest = statement, bound[0]
        elif bound is not None and is_empty_list(bound[1]):
            made[bound[0]] = statement
        elif isinstance(statement, cst.For) and dotted_name(statement.iter) == name and longest is not None:
            target = _padded_list(statement, longest[1])
            if target is None or target not in made:
                return None
            after = rest[number + 1 :]
            calls = [each for each in _whole_calls(after, target) if call_of(each) == "torch.stack"]
            inside = [longest[0], made[target], statement]
            others = [each for each in rest if each not in inside]
            if len(calls) != 1 or _num_reads(others, target) != 1 or _num_reads(others, name):
                return None
            read_later = _num_reads(after, longest[1]) > 0
            return Consumer(
                removed=tuple(inside), whole=calls[0], lengths=(longest[1],) if read_later else ()
            )
    return None


def _is_longest(value: cst.BaseExpression, name: str) -> bool:
    """Match `max(s.size(0) for s in sequences)`, also over a list, and `max(map(len, sequences))`."""
    if not isinstance(value, cst.Call) or call_of(value) != "max" or len(value.args) != 1:
        return False
    inner = value.args[0].value
    if isinstance(inner, cst.Call) and call_of(inner) == "map" and len(inner.args) == 2:
        return dotted_name(inner.args[0].value) == "len" and dotted_name(inner.args[1].value) == name
    if not isinstance(inner, (cst.GeneratorExp, cst.ListComp)):
        return False
    clause = inner.for_in
    is_plain = not clause.ifs and clause.inner_for_in is None and dotted_name(clause.iter) == name
    return is_plain and isinstance(clause.target, cst.Name) and _is_length(inner.elt, clause.target.value)


def _is_length(node: cst.CSTNode, name: str) -> bool:
    """Match `s.size(0)`, `s.shape[0]` and `len(s)`."""
    return any(same(node, expression(text.format(name))) for text in ("{}.size(0)", "{}.shape[0]", "len({})"))


def _padded_list(loop: cst.For, longest: str) -> str | None:
    """Return the list that a loop fills with its sequences, each padded with zeros to `longest`."""
    if not isinstance(loop.target, cst.Name) or not isinstance(loop.body, cst.IndentedBlock):
        return None
    name, block = loop.target.value, list(loop.body.body)
    last = read_append(block[-1]) if block else None
    if last is None:
        return None
    inner: list[cst.CSTNode] = list(block[:-1])
    if len(inner) == 1 and isinstance(inner[0], cst.If):
        if inner[0].orelse is not None or not isinstance(inner[0].body, cst.IndentedBlock):
            return None
        if not _is_short(inner[0].test, name, longest):
            return None
        inner = list(inner[0].body.body)
    known: dict[str, cst.BaseExpression] = {}
    value: cst.BaseExpression = cst.Name(name)
    for statement in inner:
        made = read_assignment(statement)
        if made is None:
            return None
        new: cst.BaseExpression = substitute(
            made[1], {each: known[each.value] for each in reads(made[1]) if each.value in known}
        )
        if made[0] == name:
            value = new
        else:
            known[made[0]] = new
    appended_value: cst.BaseExpression = last[1]
    if isinstance(appended_value, cst.Name) and appended_value.value in known:
        value = known[appended_value.value]
    elif not (isinstance(appended_value, cst.Name) and appended_value.value == name):
        value = substitute(
            appended_value, {each: known[each.value] for each in reads(appended_value) if each.value in known}
        )
    return last[0] if _pads_with_zeros(value, name, longest) else None


def _is_short(test: cst.BaseExpression, name: str, longest: str) -> bool:
    if not isinstance(test, cst.Comparison) or len(test.comparisons) != 1:
        return False
    left, comparison = test.left, test.comparisons[0]
    operator, right = comparison.operator, comparison.comparator
    if isinstance(operator, (cst.LessThan, cst.NotEqual)):
        return _is_length(left, name) and dotted_name(right) == longest
    if isinstance(operator, cst.GreaterThan):
        return dotted_name(left) == longest and _is_length(right, name)
    return False


def _pads_with_zeros(value: cst.BaseExpression, name: str, longest: str) -> bool:
    """Match `torch.cat([s, torch.zeros(longest - s.size(0), ...)])` and the equivalent `F.pad(s, ...)`."""
    called = call_of(value)
    if not isinstance(value, cst.Call) or called is None:
        return False
    if (
        called.rpartition(".")[2] == "pad"
        and len(value.args) == 2
        and dotted_name(value.args[0].value) == name
    ):
        widths = value.args[1].value
        if not isinstance(widths, (cst.Tuple, cst.List)) or len(widths.elements) < 2:
            return False
        zeros, end = widths.elements[:-1], widths.elements[-1]
        return all(is_zero(each.value) for each in zeros) and _is_missing(end.value, name, longest)
    if called not in ("torch.cat", "torch.concat"):
        return False
    axis = argument(value, "dim", 1)
    joined = argument(value, "tensors", 0)
    if not isinstance(joined, (cst.List, cst.Tuple)) or len(joined.elements) != 2:
        return False
    if axis is not None and not is_zero(axis):
        return False
    first, zeros_call = (each.value for each in joined.elements)
    if dotted_name(first) != name or not isinstance(zeros_call, cst.Call) or not zeros_call.args:
        return False
    if (call_of(zeros_call) or "").rpartition(".")[2] not in ("zeros", "new_zeros"):
        return False
    size = zeros_call.args[0].value
    if isinstance(size, (cst.Tuple, cst.List)) and size.elements:
        size = size.elements[0].value
    return _is_missing(size, name, longest)


def _is_missing(node: cst.CSTNode, name: str, longest: str) -> bool:
    if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Subtract):
        return False
    return dotted_name(node.left) == longest and _is_length(node.right, name)
