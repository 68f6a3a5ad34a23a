"""Find handwritten attention: a product of queries and keys, a softmax, and a product with values.

While calls are counted, this traces the results of batched products through scaling, masking, softmax and
dropout to the next product.  It holds tensors weakly, so as not to keep them alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from flatout.measure.evidence import Place
from flatout.measure.user_code import UserCode

PRODUCTS = frozenset(("matmul", "__matmul__", "bmm"))
CHANGES = frozenset(
    (
        *("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "add", "__add__", "masked_fill"),
        *("to", "float", "type_as"),
    )
)
KEEPS = frozenset(("dropout", "softmax"))
NAMES = PRODUCTS | CHANGES | KEEPS
FEWEST_KEYS = 16  # below it attention is too small to matter
ATTENTION, PRODUCT = "attention", "attention product"
CallPlace = tuple[Place | None, str | None]  # a line, and the library line it went through


class AttentionCalls:
    """Counts each attention at the lines of its last and its first product."""

    def __init__(self, user_code: UserCode, count: Callable[[str, CallPlace, str], None]) -> None:
        self._user_code, self._count = user_code, count
        # by identity: the tensor, the line of its product, and whether softmax was applied
        self._followed: dict[int, tuple[weakref.ref[Any], CallPlace, bool]] = {}

    def see(self, name: str, args: tuple[Any, ...], result: Any, frame: FrameType) -> None:
        """Trace the result of a call of one of NAMES."""
        import torch

        if not args or not isinstance(args[0], torch.Tensor) or not isinstance(result, torch.Tensor):
            return
        known = self._followed.get(id(args[0]))
        if known is not None and known[0]() is not args[0]:
            known = None
        if name in PRODUCTS:
            if known is not None and known[2]:
                self._count(PRODUCT, known[1], result.device.type)
                self._count(ATTENTION, self._user_code.place(frame), result.device.type)
            elif known is None and result.dim() >= 3 and result.shape[-1] >= FEWEST_KEYS:
                self._followed[id(result)] = (weakref.ref(result), self._user_code.place(frame), False)
        elif known is not None:
            self._followed[id(result)] = (weakref.ref(result), known[1], known[2] or name == "softmax")
