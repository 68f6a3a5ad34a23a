"""Calls that make a tensor from a list of NumPy arrays, which torch reads number by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.overrides import TorchFunctionMode

OF_ARRAYS = " of arrays"
MAKES = (
    "tensor",
    "as_tensor",
    "asarray",
    "new_tensor",
    "Tensor",
    "FloatTensor",
    "DoubleTensor",
    "LongTensor",
)
DEEPEST = 3  # lists in lists


def of_arrays(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call makes a tensor from a list of arrays."""
    if name not in MAKES:
        return False
    value = args[1] if name == "new_tensor" and len(args) > 1 else args[0] if args else None
    for _ in range(DEEPEST):
        if not isinstance(value, (list, tuple)) or not value:
            return False
        value = value[0]
        if isinstance(value, np.ndarray) and value.ndim:
            return True
    return False


class ArrayLists(TorchFunctionMode):
    """Reports the name of each such call."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if of_arrays(name, args):
            self._note(f"torch.{name}{OF_ARRAYS}")
        return function(*args, **(kwargs or {}))
