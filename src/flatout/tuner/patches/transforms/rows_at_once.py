"""Take rows by one index, instead of one by one.

    torch.stack([x[i, n - 1] for i, n in enumerate(lengths)])
    ->  x[torch.tensor([(i, n - 1) for i, n in enumerate(lengths)], device=x.device).unbind(1)]

One gather has one backward; each row alone has a gradient as large as all of `x`.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.joined_lists import JoinedList, index_parts, rewrite_joined_lists
from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.purity import impure_part
from flatout.tuner.patches.source import Refused, SourceFile, expression
from flatout.tuner.patches.syntax import names


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    otherwise = "no loop or comprehension here takes rows one by one and stacks them"
    return rewrite_joined_lists(source, lines, _one_index, kinds={}, otherwise=otherwise)


def _one_index(source: SourceFile, found: JoinedList) -> cst.BaseExpression:
    if found.joined != "stack":
        raise Refused("torch.cat joins the rows, which may have no axis of their own")
    parts = index_parts(found.element)
    if parts is None:
        raise Refused(f"{source.code(found.element)} is not a row of a tensor")
    owner, indices = parts
    if owner.partition(".")[0] in found.changed:
        raise Refused(f"{owner} changes from row to row")
    for index in indices:
        if impure_part(index, {}) is not None or isinstance(index, (cst.Tuple, cst.List)):
            raise Refused(f"the value of the index {source.code(index)} is unknown")
    if not any(names(index) & found.names for index in indices):
        raise Refused("every row is the same")
    inner = ", ".join(f"int({source.code(index)})" for index in indices)
    if len(indices) == 1:
        return expression(f"{owner}[torch.tensor([{inner} {found.clauses}], device={owner}.device)]")
    return expression(f"{owner}[torch.tensor([({inner}) {found.clauses}], device={owner}.device).unbind(1)]")


PATCH = Patch(
    rewrite, "take all rows by one index instead of one by one", safety="reordered", answers=("FO302",)
)
