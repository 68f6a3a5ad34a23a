from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.measure.device.flops import flops_of


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops: list[float | None] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.flops.append(flops_of(function, args, kwargs or {}, result))
        return result


def flops(work: Callable[[], object]) -> list[float]:
    with Counted() as counted:
        work()
    return [each for each in counted.flops if each]


def test_a_product_counts_and_a_sum_does_not() -> None:
    left, right = torch.ones(2, 3), torch.ones(3, 5)
    assert flops(lambda: left @ right + 1) == [2 * 2 * 3 * 5]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("store", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_matrix_counts_for_the_values_that_it_stores(store: Callable[..., torch.Tensor]) -> None:
    graph, features = store(torch.eye(100)), torch.ones(100, 8)
    assert flops(lambda: graph @ features) == [2 * 100 * 8]


def test_the_gradient_of_a_sparse_product_is_as_sparse() -> None:
    graph, features = torch.eye(100).to_sparse(), torch.ones(100, 8, requires_grad=True)
    found = flops(lambda: torch.spmm(graph, features).sum().backward())  # type: ignore[no-untyped-call]
    assert found == [2 * 100 * 8] * 2


def test_arguments_that_no_formula_knows_count_as_nothing() -> None:
    assert flops_of(torch.ops.aten.mm.default, (torch.ones(2, 3),), {}, None) is None
    assert flops_of(torch.ops.aten.mm.default, ("no", "tensors"), {}, None) is None
