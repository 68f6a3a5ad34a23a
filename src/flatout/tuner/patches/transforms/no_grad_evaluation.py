"""Evaluate without gradients: `@torch.no_grad()` above a function that evaluates and returns numbers."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.source import Refused, Replacement, SourceFile, expression
from flatout.tuner.patches.syntax import call_of, method_of, target_names, walk

NUMBERS = {"item", "tolist", "numpy", "cpu_numpy"}
LEARNS = {"backward", "grad", "enable_grad", "requires_grad_", "set_grad_enabled", "step"}


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    changes: dict[cst.CSTNode, Replacement] = {}
    reason = "no function here calls eval()"
    for each in walk(source.module):
        if not isinstance(each, cst.FunctionDef) or not _evaluates(each):
            continue
        if lines and not any(source.holds(each, line) for line in lines):
            continue
        try:
            _check(source, each)
        except Refused as refusal:
            reason = str(refusal)
            continue
        decorator = cst.Decorator(decorator=expression("torch.no_grad()"))
        if each.decorators:
            changes[each] = each.with_changes(decorators=[*each.decorators, decorator])
        else:
            changes[each] = each.with_changes(decorators=[decorator])
    if not changes:
        raise Refused(reason)
    return source.replaced(changes)


def _evaluates(function: cst.FunctionDef) -> bool:
    return any(
        method_of(each) == "eval" and not each.args for each in walk(function) if isinstance(each, cst.Call)
    )


def _numbers(function: cst.FunctionDef) -> set[str]:
    """Return the names of a function that only hold numbers."""
    given: dict[str, list[cst.BaseExpression]] = {}
    for each in walk(function.body):
        if isinstance(each, cst.Assign):
            for target in each.targets:
                for name in target_names(target.target):
                    plain = isinstance(target.target, cst.Name)
                    given.setdefault(name.value, []).append(each.value if plain else cst.Name("unknown"))
        elif isinstance(each, cst.AugAssign) and isinstance(each.target, cst.Name):
            given.setdefault(each.target.value, []).append(each.value)
        elif isinstance(each, (cst.For, cst.CompFor, cst.NamedExpr, cst.AnnAssign)):
            for name in target_names(each.target):
                given.setdefault(name.value, []).append(cst.Name("unknown"))
    known = set(given)
    while wrong := {name for name in known if not all(_is_number(value, known) for value in given[name])}:
        known -= wrong
    return known


def _check(source: SourceFile, function: cst.FunctionDef) -> None:
    name, numbers = function.name.value, _numbers(function)
    for each in walk(function):
        if isinstance(each, cst.Call):
            called = method_of(each) or call_of(each) or ""
            if called in LEARNS:
                raise Refused(f"{name} trains: it calls {called}")
            if called in ("no_grad", "inference_mode"):
                raise Refused(f"{name} already runs without gradients")
        if isinstance(each, (cst.Yield, cst.Await)):
            raise Refused(f"{name} is a generator")
        if isinstance(each, cst.Return) and each.value is not None and not _is_number(each.value, numbers):
            raise Refused(f"{name} returns {source.code(each.value)}, which may need its gradient")


def _is_number(value: cst.BaseExpression, numbers: set[str]) -> bool:
    """Return whether a value is a number, or built from numbers; any other name may be a tensor."""
    if isinstance(value, cst.Name):
        return value.value in numbers
    if isinstance(value, (cst.Integer, cst.Float, cst.SimpleString)):
        return True
    if isinstance(value, cst.Call):
        return method_of(value) in NUMBERS or call_of(value) in ("float", "int", "len", "round")
    if isinstance(value, (cst.Tuple, cst.List)):
        return all(_is_number(each.value, numbers) for each in value.elements)
    if isinstance(value, cst.Dict):
        return all(
            isinstance(each, cst.DictElement) and _is_number(each.value, numbers) for each in value.elements
        )
    if isinstance(value, cst.BinaryOperation):
        return _is_number(value.left, numbers) and _is_number(value.right, numbers)
    return False


PATCH = Patch(
    rewrite, "evaluate without keeping what a backward would need", safety="exact", answers=("FO801",)
)
