"""Call a model once for all samples, instead of once for each.

    torch.cat([model(x[i : i + 1]) for i in range(len(x))])   ->   model(x)

Also `for row in x.split(1)`, `x[i].unsqueeze(0)` and `x[i][None]`.  Whether the model treats each row alone
cannot be seen here; batch norm and dropout do not.  The trial shows it: other numbers are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.joined_lists import JoinedList, rewrite_joined_lists
from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.source import Refused, SourceFile, expression, same
from flatout.tuner.patches.syntax import dotted_name

ONE_ROW: tuple[str, ...] = ("{x}[{i} : {i} + 1]", "{x}[{i}].unsqueeze(0)", "{x}[{i}][None]", "{x}[{i}, None]")
ALL_ROWS: tuple[str, ...] = ("range(len({x}))", "range({x}.size(0))", "range({x}.shape[0])")
SPLITS: tuple[str, ...] = ("{x}.split(1)", "{x}.split(1, 0)", "{x}.split(1, dim=0)", "torch.split({x}, 1)")


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    otherwise = "no loop here calls a model for each sample and joins the results"
    return rewrite_joined_lists(source, lines, _one_call, kinds={}, otherwise=otherwise)


def _one_call(source: SourceFile, found: JoinedList) -> cst.BaseExpression:
    call = found.element
    model = dotted_name(call.func) if isinstance(call, cst.Call) else None
    if found.joined != "cat" or model is None or not isinstance(call, cst.Call):
        raise Refused("the joined values are not a model's results for single rows")
    if len(call.args) != 1 or call.args[0].keyword is not None or call.args[0].star:
        raise Refused(f"{model} is given more than one row")
    if model.partition(".")[0] in found.changed:
        raise Refused(f"{model} changes from row to row")
    rows = _all_rows(found, call.args[0].value)
    if rows is None or rows.partition(".")[0] in found.changed:
        raise Refused(f"{source.code(call.args[0].value)} may not cover all rows")
    return expression(f"{model}({rows})")


def _all_rows(found: JoinedList, row: cst.BaseExpression) -> str | None:
    """Return x if the loop passes each of its rows in order."""
    parts = expression(f"[None {found.clauses}]")
    assert isinstance(parts, cst.ListComp)
    clause = parts.for_in
    if clause.inner_for_in is not None or not isinstance(clause.target, cst.Name):
        return None
    if isinstance(row, cst.Name) and row.value == clause.target.value:
        owner, i, forms = _owner_of_split(clause.iter), "", SPLITS
    else:
        owner, i = _owner_of_row(row), clause.target.value
        if owner is None or not any(same(row, expression(form.format(x=owner, i=i))) for form in ONE_ROW):
            return None
        forms = ALL_ROWS
    if owner is None:
        return None
    whole = any(same(clause.iter, expression(form.format(x=owner, i=i))) for form in forms)
    return owner if whole else None


def _owner_of_split(node: cst.BaseExpression) -> str | None:
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return None
    if dotted_name(node.func) == "torch.split" and node.args:
        return dotted_name(node.args[0].value)
    return dotted_name(node.func.value)


def _owner_of_row(node: cst.BaseExpression) -> str | None:
    while True:
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            node = node.func.value
        elif isinstance(node, cst.Subscript):
            node = node.value
        else:
            return dotted_name(node)


PATCH = Patch(
    rewrite,
    "call the model once for all samples instead of once for each",
    safety="reordered",
    answers=("FO304",),
)
