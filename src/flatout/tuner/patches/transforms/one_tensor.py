"""Make one tensor, instead of many that are joined.

    torch.cat([self.kind(torch.tensor([k])) for k in kinds])  ->  self.kind(torch.tensor([k for k in kinds]))

A module that treats each row alone may come between: its rows are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.joined_lists import JoinedList, rewrite_joined_lists
from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.purity import ROWWISE, impure_part, module_kinds
from flatout.tuner.patches.source import Refused, SourceFile, expression, substitute
from flatout.tuner.patches.syntax import argument, call_of, names

MAKERS = ("torch.tensor", "torch.as_tensor", "torch.LongTensor", "torch.FloatTensor")


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    otherwise = "no loop here makes tensors one by one and joins them"
    return rewrite_joined_lists(source, lines, _one, kinds=_all_kinds(source), otherwise=otherwise)


def _all_kinds(source: SourceFile) -> dict[str, str]:
    """Map all modules to their kinds: temporaries of a loop may call any module that is known to be pure."""
    found: dict[str, str] = {}
    for node in source.module.body:
        if isinstance(node, cst.ClassDef):
            found.update(module_kinds(source, node.name))
    return found


def _one(source: SourceFile, found: JoinedList) -> cst.BaseExpression:
    made = _maker(source, found)
    element = argument(made, "data", 0)
    if element is None:
        raise Refused(f"{source.code(made)} makes an empty tensor")
    if found.joined == "cat":
        if not (isinstance(element, cst.List) and len(element.elements) == 1):
            raise Refused("torch.cat joins tensors that do not have one entry each")
        element = element.elements[0].value
    others = [each for each in made.args if each.value is not argument(made, "data", 0)]
    for each in others:
        if names(each.value) & found.changed or impure_part(each.value, {}) is not None:
            raise Refused(f"{source.code(each)} may change from tensor to tensor")
    if impure_part(element, {}) is not None:
        raise Refused(f"{source.code(element)} may have side effects")
    rest = "".join(f", {source.code(each.with_changes(comma=cst.MaybeSentinel.DEFAULT))}" for each in others)
    whole = expression(f"{source.code(made.func)}([{source.code(element)} {found.clauses}]{rest})")
    if found.element is made:
        return whole
    new = substitute(found.element, {made: whole})
    assert isinstance(new, cst.BaseExpression)
    return new


def _maker(source: SourceFile, found: JoinedList) -> cst.Call:
    """Return the call that makes the tensor: the element, or the input of modules that treat rows alone."""
    node, kinds = found.element, module_kinds(source, found.call)
    while isinstance(node, cst.Call):
        called = call_of(node)
        if called in MAKERS:
            return node
        if called not in kinds or kinds[called] not in ROWWISE or len(node.args) != 1:
            raise Refused(f"{called or 'a call'} may not treat each row alone")
        if found.joined == "stack" and kinds[called] != "Embedding":
            raise Refused(f"{called} gets tensors without a row axis")
        node = node.args[0].value
    raise Refused("the joined tensors are not made here")


PATCH = Patch(
    rewrite,
    "make one tensor of all values instead of one for each",
    safety="reordered",
    answers=("FO301", "FO304"),
)
