from __future__ import annotations

import numpy as np
import pytest
import torch

from flatout.data.dtypes import numpy_dtype, torch_dtype
from flatout.errors import BadInput


@pytest.mark.parametrize(
    "name", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
)
def test_there_and_back(name: str) -> None:
    dtype = torch_dtype(np.dtype(name), "x")
    assert str(dtype) == f"torch.{name}"
    assert numpy_dtype(dtype, "x") == np.dtype(name)


def test_a_dtype_without_counterpart_names_the_field() -> None:
    with pytest.raises(BadInput, match="field 'words'"):
        torch_dtype(np.dtype("U3"), "words")
    with pytest.raises(BadInput, match="field 'half'"):
        numpy_dtype(torch.bfloat16, "half")
