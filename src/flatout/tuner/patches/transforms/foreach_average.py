"""Average weights over all parameters at once.

    for p, q in zip(ema.parameters(), model.parameters()):
        p.data.mul_(decay).add_(q.data, alpha=1 - decay)
    ->
    with torch.no_grad():
        torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)

Two shares that do not add up to 1 become `_foreach_mul_` and `_foreach_add_`.  Also
`p.data.lerp_(q.data, w)` and `p.data.copy_(a * q.data + b * p.data)`, as target networks use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from flatout.tuner.patches.patch import Patch
from flatout.tuner.patches.purity import impure_part
from flatout.tuner.patches.source import Refused, Replacement, SourceFile, expression, same, statements
from flatout.tuner.patches.syntax import argument, call_of, method_of, names, simple, walk


def rewrite(source: SourceFile, lines: Sequence[int]) -> str:
    changes: dict[cst.CSTNode, Replacement] = {}
    reason = "no loop here averages parameters one by one"
    for loop in [each for each in walk(source.module) if isinstance(each, cst.For)]:
        if lines and not any(source.holds(loop, line) for line in lines):
            continue
        pair = _pair(source, loop)
        if pair is None:
            continue
        try:
            text = _together(source, loop, *pair)
        except Refused as refusal:
            reason = str(refusal)
            continue
        new = statements(text)
        changes[loop] = [new[0].with_changes(leading_lines=loop.leading_lines)]
    if not changes:
        raise Refused(reason)
    return source.replaced(changes)


def _pair(source: SourceFile, loop: cst.For) -> tuple[dict[str, str], cst.BaseSmallStatement] | None:
    """Return ({name: the parameters it stands for}, the single statement) of a loop over two models."""
    if call_of(loop.iter) != "zip" or not isinstance(loop.iter, cst.Call) or loop.orelse is not None:
        return None
    models = [each.value for each in loop.iter.args if each.keyword is None]
    if len(models) != 2 or not all(method_of(each) == "parameters" for each in models):
        return None
    if not isinstance(loop.target, cst.Tuple) or not isinstance(loop.body, cst.IndentedBlock):
        return None
    own = [each.value for each in loop.target.elements]
    if len(own) != 2 or not all(isinstance(each, cst.Name) for each in own) or len(loop.body.body) != 1:
        return None
    small = simple(loop.body.body[0])
    if small is None:
        return None
    named = {
        each.value: source.code(model)
        for each, model in zip(own, models, strict=True)
        if isinstance(each, cst.Name)
    }
    return named, small


def _together(source: SourceFile, loop: cst.For, named: dict[str, str], small: cst.BaseSmallStatement) -> str:
    if not isinstance(small, cst.Expr) or not isinstance(small.value, cst.Call):
        raise Refused("the loop over parameters does more than one in-place call")
    call = small.value
    kind = method_of(call)
    assert isinstance(call.func, cst.Attribute)
    if kind == "add_":
        lines = _decayed(source, call, named)
    elif kind == "lerp_":
        target, other = _name(call.func.value, named), _name(argument(call, "end", 0), named)
        weight = _weight(source, argument(call, "weight", 1), named)
        lines = [f"torch._foreach_lerp_(list({named[target]}), list({named[other]}), {weight})"]
    elif kind == "copy_":
        lines = _mixed(source, call, named)
    else:
        raise Refused(f"{kind} has no known form for all parameters at once")
    return "with torch.no_grad():\n" + "".join(f"    {line}\n" for line in lines)


def _decayed(source: SourceFile, call: cst.Call, named: dict[str, str]) -> list[str]:
    """Read `p.mul_(d).add_(q, alpha=1 - d)`, also with `(1 - d) * q` or `q * (1 - d)` inside."""
    assert isinstance(call.func, cst.Attribute)
    inner = call.func.value
    if (
        method_of(inner) != "mul_"
        or not isinstance(inner, cst.Call)
        or not isinstance(inner.func, cst.Attribute)
    ):
        raise Refused("parameters are not scaled before the addition")
    target = _name(inner.func.value, named)
    decay = _weight(source, argument(inner, "other", 0), named)
    added, alpha = argument(call, "other", 0), argument(call, "alpha")
    if alpha is None and isinstance(added, cst.BinaryOperation):
        alpha, added = _product(added, named)
    other = _name(added, named)
    if other == target:
        raise Refused("a parameter is averaged with itself")
    share = "1" if alpha is None else _weight(source, alpha, named)
    return _summed(named[target], decay, named[other], share)


def _mixed(source: SourceFile, call: cst.Call, named: dict[str, str]) -> list[str]:
    """Read `p.copy_(a * q + b * p)` and `p.copy_(q)`."""
    assert isinstance(call.func, cst.Attribute)
    target, value = _name(call.func.value, named), argument(call, "other", 0) or argument(call, "src", 0)
    if not isinstance(value, cst.BinaryOperation):
        return [f"torch._foreach_copy_(list({named[target]}), list({named[_name(value, named)]}))"]
    if not isinstance(value.operator, cst.Add):
        raise Refused("parameters are mixed by more than a sum")
    shares = {}
    for side in (value.left, value.right):
        if not isinstance(side, cst.BinaryOperation):
            raise Refused("parameters are mixed by more than a sum of two shares")
        weight, term = _product(side, named)
        shares[_name(term, named)] = _weight(source, weight, named)
    if len(shares) != 2:
        raise Refused("a parameter is averaged with itself")
    (other,) = set(shares) - {target}
    return _summed(named[target], shares[target], named[other], shares[other])


def _summed(target: str, kept: str, other: str, share: str) -> list[str]:
    """Return the sum of two shares; one call if they add up to 1."""
    if _is_rest(share, of=kept) or _is_rest(kept, of=share):
        return [f"torch._foreach_lerp_(list({target}), list({other}), {share})"]
    return [
        f"torch._foreach_mul_(list({target}), {kept})",
        f"torch._foreach_add_(list({target}), list({other}), alpha={share})",
    ]


def _is_rest(share: str, *, of: str) -> bool:
    """Return whether an expression is 1 minus another."""
    node = expression(share)
    return (
        isinstance(node, cst.BinaryOperation)
        and isinstance(node.operator, cst.Subtract)
        and isinstance(node.left, (cst.Integer, cst.Float))
        and node.left.value in ("1", "1.0", "1.")
        and same(node.right, expression(of))
    )


def _product(
    node: cst.BinaryOperation, named: dict[str, str]
) -> tuple[cst.BaseExpression, cst.BaseExpression]:
    """Return (number, parameter) of a product."""
    if not isinstance(node.operator, cst.Multiply):
        raise Refused("parameters are mixed by more than a sum of two shares")
    if names(node.left) & set(named):
        return node.right, node.left
    return node.left, node.right


def _name(node: cst.CSTNode | None, named: dict[str, str]) -> str:
    """Return `p` of `p`, `p.data` and `p.detach()`."""
    if isinstance(node, cst.Call) and method_of(node) == "detach" and isinstance(node.func, cst.Attribute):
        node = node.func.value
    if isinstance(node, cst.Attribute) and node.attr.value == "data":
        node = node.value
    if not isinstance(node, cst.Name) or node.value not in named:
        raise Refused("an averaged value is not a parameter of the two models")
    return node.value


def _weight(source: SourceFile, node: cst.BaseExpression | None, named: dict[str, str]) -> str:
    if node is None or names(node) & set(named) or impure_part(node, {}) is not None:
        raise Refused("the weight of the average is not one number for all parameters")
    return source.code(node)


PATCH = Patch(
    rewrite, "average the weights of two models in a few kernels", safety="reordered", answers=("FO205",)
)
