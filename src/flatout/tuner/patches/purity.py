"""What can be computed once instead of many times, or for all rows at once.

An expression is *pure* if it has no effect but its value, and the same value every time: no random numbers,
no state, no printing.  A module's call is known to be pure if the class's `__init__` shows what the module
is.
"""

from __future__ import annotations

import libcst as cst

from flatout.tuner.patches.source import SourceFile
from flatout.tuner.patches.syntax import call_of, dotted_name, is_zero, method_of, walk

# Modules without state or randomness that treat each row alone.
ROWWISE = {
    "Embedding", "Linear", "LayerNorm", "RMSNorm", "Identity", "ReLU", "GELU", "SiLU", "Tanh", "Sigmoid",
    "Softplus", "ELU", "LeakyReLU", "Mish", "Hardswish",
}  # fmt: skip
CREATING = {
    "tensor", "as_tensor", "zeros", "ones", "full", "arange", "eye", "linspace", "triu", "tril", "zeros_like",
    "ones_like", "full_like",
}  # fmt: skip
COMPUTING = {
    "cat", "stack", "relu", "tanh", "sigmoid", "exp", "log", "sqrt", "abs", "sin", "cos", "where", "maximum",
    "minimum", "matmul", "einsum", "sum", "mean", "float", "long", "double",
}  # fmt: skip
METHODS = {
    "size", "dim", "numel", "unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "transpose",
    "permute", "flatten", "to", "float", "double", "half", "bfloat16", "long", "int", "bool", "type_as",
    "detach", "item", "tolist", "sum", "mean", "abs", "exp", "log", "sqrt", "sin", "cos", "relu", "tanh",
    "sigmoid", "norm", "softmax", "log_softmax", "t", "contiguous", "cuda", "cpu",
}  # fmt: skip
BUILTINS = {"len", "int", "float", "bool", "range", "min", "max", "abs", "round", "tuple", "list"}
LITERALS = (cst.Name, cst.Integer, cst.Float, cst.SimpleString)


def module_kinds(source: SourceFile, node: cst.CSTNode) -> dict[str, str]:
    """Map `self.x` to the kind of the module, for the class around a node; unknown if it is set twice."""
    owner = source.class_of(node)
    found: dict[str, list[str]] = {}
    for each in walk(owner) if owner is not None else ():
        if isinstance(each, cst.Assign):
            for assigned in each.targets:
                name = dotted_name(assigned.target)
                if name is not None and name.startswith("self."):
                    found.setdefault(name, []).append(_kind(each.value))
    return {name: kinds[0] for name, kinds in found.items() if len(kinds) == 1 and kinds[0]}


def _kind(value: cst.BaseExpression) -> str:
    called = call_of(value)
    if called is None or not isinstance(value, cst.Call):
        return ""
    kind = called.rpartition(".")[2]
    if kind == "Sequential":
        kinds = {_kind(each.value) for each in value.args if not each.star}
        all_rows = bool(value.args) and len(kinds) >= 1 and not any(each.star for each in value.args)
        return "Linear" if all_rows and kinds <= ROWWISE else ""
    if any(each.keyword is not None and each.keyword.value == "max_norm" for each in value.args):
        return ""
    return kind


def impure_part(node: cst.CSTNode, kinds: dict[str, str]) -> cst.CSTNode | None:
    """Return the first part of an expression that may act or vary from call to call; None if it is pure."""
    if isinstance(node, LITERALS):
        return None
    if isinstance(node, cst.Attribute):
        return impure_part(node.value, kinds)
    if isinstance(node, cst.Call):
        if not _is_pure_call(node, kinds):
            return node
        inner = [node.func.value] if isinstance(node.func, cst.Attribute) else []
        return _first([*inner, *(each.value for each in node.args)], kinds)
    if isinstance(
        node,
        (
            cst.BinaryOperation, cst.UnaryOperation, cst.Comparison, cst.BooleanOperation, cst.Tuple,
            cst.List, cst.Subscript, cst.IfExp, cst.Element, cst.SubscriptElement, cst.Index, cst.Slice,
            cst.ComparisonTarget,
        ),
    ):  # fmt: skip
        parts = [each for each in node.children if not isinstance(each, NEUTRAL)]
        return _first(parts, kinds)
    return node


NEUTRAL = (
    cst.BaseParenthesizableWhitespace, cst.BaseBinaryOp, cst.BaseUnaryOp, cst.BaseBooleanOp, cst.BaseCompOp,
    cst.Comma, cst.Colon, cst.LeftParen, cst.RightParen, cst.LeftSquareBracket, cst.RightSquareBracket,
)  # fmt: skip


def _first(parts: list[cst.BaseExpression] | list[cst.CSTNode], kinds: dict[str, str]) -> cst.CSTNode | None:
    for part in parts:
        found = impure_part(part, kinds)
        if found is not None:
            return found
    return None


def _is_pure_call(node: cst.Call, kinds: dict[str, str]) -> bool:
    if any(each.star for each in node.args):
        return False
    called = call_of(node)
    if called is not None:
        owner, _, last = called.rpartition(".")
        if owner == "torch":
            return last in CREATING | COMPUTING
        if owner in ("F", "nn.functional", "torch.nn.functional"):
            return last in COMPUTING | {
                "gelu",
                "silu",
                "softmax",
                "one_hot",
                "layer_norm",
                "linear",
                "embedding",
            }
        if not owner:
            return last in BUILTINS
        if owner in ("self", "cls"):
            return kinds.get(called) in ROWWISE
    return method_of(node) in METHODS


def has_one_row(node: cst.CSTNode) -> bool:
    """Return whether an expression holds a value whose first axis has one entry, like `torch.tensor([0])`."""
    for each in walk(node):
        if isinstance(each, cst.Call):
            if call_of(each) in ("torch.tensor", "torch.as_tensor") and each.args:
                first = each.args[0].value
                if isinstance(first, (cst.List, cst.Tuple)) and len(first.elements) == 1:
                    return True
            if method_of(each) == "unsqueeze" and each.args and is_zero(each.args[0].value):
                return True
    return False
