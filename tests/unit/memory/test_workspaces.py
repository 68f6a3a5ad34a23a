"""What kernels take beside their results: cuBLAS, cuDNN, sums, embeddings, softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.memory import attention
from flatout.memory.formulas import Formula
from flatout.memory.workspaces import Workspaces

aten = torch.ops.aten
MIB = 1 << 20
CONVOLUTION = aten.convolution.default
CONVOLUTION_BACKWARD = aten.convolution_backward.default


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, channels_last: bool = False) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device="meta")
    return made.to(memory_format=torch.channels_last) if channels_last else made


def convolution(x: Tensor, weight: Tensor, *, stride: int = 1, padding: int = 0, groups: int = 1) -> Any:
    args = (x, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    return Workspaces().of(CONVOLUTION, args, {})


def convolution_backward(x: Tensor, weight: Tensor, *, groups: int = 1, padding: int = 1) -> Any:
    gradient = aten.convolution(x, weight, None, [1, 1], [padding] * 2, [1, 1], False, [0, 0], groups)
    spans = ([1, 1], [padding] * 2, [1, 1])
    args = (gradient, x, weight, None, *spans, False, [0, 0], groups, [True, True, False])
    return Workspaces().of(CONVOLUTION_BACKWARD, args, {})


def test_a_convolution_copies_input_output_and_weight_as_measured() -> None:
    x, weight = meta(32, 64, 56, 56), meta(64, 64, 3, 3)
    ((num_bytes,),) = convolution(x, weight, padding=1)
    assert num_bytes == 2 * (2 * x.numel() + weight.numel())
    assert num_bytes / MIB == pytest.approx(24.57, abs=0.005)


def test_nothing_is_copied_that_lies_channels_last_or_is_a_plain_product() -> None:
    assert convolution(meta(8, 64, 56, 56, channels_last=True), meta(64, 64, 3, 3)) == ()
    assert convolution(meta(8, 64, 56, 56), meta(64, 64, 1, 1)) == ()
    assert convolution(meta(8, 64, 56, 56), meta(64, 1, 3, 3), groups=64) == ()
    assert convolution(meta(8, 3, 56, 56, dtype=torch.float32), meta(64, 3, 4, 4), stride=4) == ()


def test_few_channels_are_padded_to_eight_in_half_precision() -> None:
    x, weight = meta(8, 3, 56, 56, channels_last=True), meta(64, 3, 3, 3)
    ((num_bytes,),) = convolution(x, weight)
    assert num_bytes == 2 * (8 * 8 * 56 * 56 + weight.numel())
    wide = meta(8, 3, 56, 56, dtype=torch.float32, channels_last=True)
    assert convolution(wide, meta(64, 3, 3, 3, dtype=torch.float32)) == ()


def test_strides_and_padding_size_the_copy_of_the_output() -> None:
    x, weight = meta(2, 16, 20, 20), meta(32, 16, 3, 3)
    ((num_bytes,),) = convolution(x, weight, stride=2, padding=1)
    assert num_bytes == 2 * (x.numel() + 2 * 32 * 10 * 10 + weight.numel())


def test_a_backward_copies_for_the_input_and_then_sums_for_the_weight() -> None:
    x, weight = meta(32, 64, 56, 56), meta(64, 64, 3, 3)
    copies = 2 * (2 * x.numel() + weight.numel())
    assert convolution_backward(x, weight) == (
        (copies,),
        (Formula("split sums", (32 * 56 * 56, copies)),),
    )
    last = meta(32, 64, 56, 56, channels_last=True)
    assert convolution_backward(last, weight) == ((Formula("split sums", (32 * 56 * 56, 0)),),)
    assert convolution_backward(x, meta(64, 1, 3, 3), groups=64) == ()
    assert convolution_backward(x, meta(64, 64, 1, 1), padding=0) == ((32 * 64 * 64 * 4,),)


def test_the_gradient_of_a_bias_is_summed_in_parts() -> None:
    spaces = Workspaces(num_multiprocessors=100)
    x = meta(64, 512, 3072)
    ((formula,),) = spaces.of(aten.sum.dim_IntList, (x, [0, 1]), {})
    assert formula == Formula("partial sums", (3072, 32768, 100))
    assert spaces.of(aten.sum.dim_IntList, (x, [2]), {}) == ()  # along the fastest dimension
    assert spaces.of(aten.sum.dim_IntList, (x, []), {}) == ()


def test_the_gradient_of_a_table_sorts_its_indices() -> None:
    args = (meta(64, 512, 768), meta(64, 512, dtype=torch.long), 30522, -1, False)
    ((*order, pieces),) = Workspaces().of(aten.embedding_dense_backward.default, args, {})
    assert [block.num_bytes for block in order] == [8 * 32768] * 3
    assert pieces.num_bytes == 103_827_456


def test_the_backward_of_softmax_holds_a_product() -> None:
    x = meta(4, 8, 16)
    assert Workspaces().of(aten._softmax_backward_data.default, (x, x, -1, x.dtype), {}) == (
        (2 * x.numel(),),
    )


@pytest.mark.parametrize("func", sorted(attention.BACKWARDS, key=str))
def test_each_attention_has_its_own_accumulators(func: Any) -> None:
    x = meta(4, 8, 512, 64)
    assert Workspaces().of(func, (x, x, x), {}) == attention.backward_workspace(func, (x, x, x))


def test_other_operations_take_nothing() -> None:
    assert Workspaces().of(aten.add.Tensor, (meta(4), meta(4)), {}) == ()
    assert Workspaces().lasting(aten.add.Tensor, in_backward=False) == ()


@pytest.mark.parametrize(
    ("capability", "num_bytes"),
    [((9, 0), 32 * MIB), (None, 32 * MIB), ((10, 0), 32 * MIB), ((8, 0), 8_519_680), ((12, 0), 8_519_680)],
)
def test_products_take_a_block_once_for_each_direction(
    capability: tuple[int, int] | None, num_bytes: int
) -> None:
    spaces = Workspaces(compute_capability=capability)
    assert spaces.lasting(aten.mm.default, in_backward=False) == (num_bytes,)
    assert spaces.lasting(aten.bmm.default, in_backward=False) == ()
    assert spaces.lasting(aten.addmm.default, in_backward=True) == (num_bytes, MIB)
    assert spaces.lasting(aten.addmm.default, in_backward=False) == ()
