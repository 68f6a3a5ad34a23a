"""Floating-point operations of one call of an operator, by torch's own formulas.

The formulas know shapes alone, so a product with a sparse matrix is counted as a dense one, which may be a
hundred times its work: only the share of the values that are stored counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

# What a formula may raise for arguments it was not written for.
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> float | None:
    """Return the operations of a call, or None if it has no formula."""
    formula = flop_registry.get(getattr(operator, "_overloadpacket", operator))
    if formula is None:
        return None
    try:
        flops = float(formula(*args, **kwargs, out_val=result))
        return flops * math.prod(map(_stored_share, args))
    except _ERRORS:
        return None


def _stored_share(argument: Any) -> float:
    if not isinstance(argument, torch.Tensor) or argument.layout is torch.strided:
        return 1.0
    values = argument._values() if argument.layout is torch.sparse_coo else argument.values()
    return values.numel() / max(1, argument.numel())
