"""NumPy's dtypes and torch's, each as the other's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flatout.errors import BadInput

Array = npt.NDArray[Any]

_TORCH_DTYPES: dict[Any, torch.dtype] = {}


def torch_dtype(dtype: np.dtype[Any], field: str) -> torch.dtype:
    """Torch's counterpart of a NumPy dtype, or an error that names the field."""
    found = _TORCH_DTYPES.get(dtype)
    if found is None:
        try:
            found = _TORCH_DTYPES[dtype] = torch.from_numpy(np.empty(0, dtype)).dtype
        except (TypeError, ValueError) as error:
            raise BadInput(f"field {field!r}: torch has no dtype for NumPy's {dtype}") from error
    return found


def numpy_dtype(dtype: torch.dtype, field: str) -> np.dtype[Any]:
    """NumPy's counterpart of a torch dtype, or an error that names the field."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as error:
        raise BadInput(
            f"field {field!r}: NumPy has no {dtype}", hint="cast the batch after it is made"
        ) from error
