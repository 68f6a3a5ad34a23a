"""Memory that a kernel takes for the time of one operation, beside its results.

    reductions     partial sums, when few outputs are summed over many rows (the gradient of a bias)
    embeddings     the gradient of a table is summed in pieces after sorting the indices
    softmax        its backward multiplies gradient and result first
    convolutions   cuDNN's kernels want channels last: inputs in the usual order are copied
    attention      accumulators, see `attention`

The formulas follow PyTorch's kernels and were checked against allocations on an H200 (torch 2.11).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatout.memory import attention
from flatout.memory.formulas import Formula

aten = torch.ops.aten
ALIGNED_BYTES = 16
WIDE = 512  # channels
WIDE_PATCH = 8

Group = tuple[int | Formula, ...]  # blocks that are held together

PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
BIASED_PRODUCT = aten.addmm.default
HOPPER = (9, 0)
PRODUCT_BYTES, HOPPER_PRODUCT_BYTES, EPILOGUE_BYTES = 8_519_680, 32 << 20, 1 << 20


class Workspaces:
    """Blocks that an operation takes beside its results, one group of them after the other.

    cuBLAS takes a block for good with the first product of each thread: one in the forward, one in the
    backward; and a small one with the first product that adds a bias.
    """

    def __init__(
        self, *, compute_capability: tuple[int, int] | None = None, num_multiprocessors: int | None = None
    ) -> None:
        self.num_multiprocessors = num_multiprocessors or 132
        capability = compute_capability or HOPPER
        self._product_bytes = HOPPER_PRODUCT_BYTES if capability >= HOPPER else PRODUCT_BYTES
        if capability[0] == 12:  # not of the datacentre line
            self._product_bytes = PRODUCT_BYTES
        self._taken: set[str] = set()
        self._rules: dict[Any, Callable[[Any, Any], tuple[Group, ...]]] = {
            aten.sum.dim_IntList: self._sum,
            aten.mean.dim: self._sum,
            aten.embedding_dense_backward.default: _embedding,
            aten._softmax_backward_data.default: _softmax,
            aten.convolution.default: _convolution,
            aten.convolution_backward.default: _convolution_backward,
        }
        for func in attention.BACKWARDS:
            self._rules[func] = _attention_backward(func)

    def of(self, func: Any, args: Any, kwargs: Any) -> tuple[Group, ...]:
        rule = self._rules.get(func)
        return () if rule is None else rule(args, kwargs)

    def lasting(self, func: Any, *, in_backward: bool) -> tuple[int, ...]:
        """Blocks that the library takes with this operation and never gives back."""
        if func not in PRODUCTS:
            return ()
        wanted = {"backward" if in_backward else "forward": self._product_bytes}
        if func is BIASED_PRODUCT:
            wanted["epilogue"] = EPILOGUE_BYTES
        fresh = tuple(num_bytes for name, num_bytes in wanted.items() if name not in self._taken)
        self._taken.update(wanted)
        return fresh

    def _sum(self, args: Any, kwargs: Any) -> tuple[Group, ...]:
        """Sums over slow dimensions: the gradient of a bias."""
        x, dims = args[0], args[1]
        if not dims or not x.dim() or x.dtype.itemsize > 4:
            return ()
        reduced = {dim % x.dim() for dim in dims}
        num_inputs = math.prod(x.shape[dim] for dim in reduced)
        fastest = min((dim for dim in range(x.dim()) if x.shape[dim] > 1), key=x.stride, default=None)
        if fastest is None or fastest in reduced:
            return ()
        numbers = (x.numel() // max(1, num_inputs), num_inputs, self.num_multiprocessors)
        return ((Formula("partial sums", numbers),),)


def _attention_backward(func: Any) -> Callable[[Any, Any], tuple[Group, ...]]:
    return lambda args, _kwargs: attention.backward_workspace(func, args)


def _embedding(args: Any, kwargs: Any) -> tuple[Group, ...]:
    gradient, indices, num_rows = args[0], args[1], args[2]
    count = indices.numel()
    order = Formula("sorted indices", (count,))
    return ((order, order, order, Formula("pieces of a table", (count, num_rows, gradient.shape[-1]))),)


def _softmax(args: Any, kwargs: Any) -> tuple[Group, ...]:
    return ((args[1].numel() * args[1].dtype.itemsize,),)


def _convolution(args: Any, kwargs: Any) -> tuple[Group, ...]:
    x, weight, _bias, stride, padding, dilation, transposed, _output_padding, groups = args
    if _is_depthwise(x, groups) or not _copies(x, weight, stride):
        return _padded_channels(x, weight)
    patches = tuple(stride) == tuple(weight.shape[2:])  # each input is read once
    if patches and not transposed and (x.dtype.itemsize > 2 or max(stride) < WIDE_PATCH):
        return ()
    out = _output_elements(x, weight, stride, padding, dilation, transposed)
    return ((_channels_last_bytes(x, weight, out),),)


def _convolution_backward(args: Any, kwargs: Any) -> tuple[Group, ...]:
    gradient, x, weight, _bias_sizes, stride = args[:5]
    groups, mask = args[9], args[10]
    if _is_depthwise(x, groups):
        return ()
    result: list[Group] = []
    copies = _copies(x, weight, stride)
    if mask[0] and copies:
        result.append((_channels_last_bytes(x, weight, gradient.numel()),))
    if mask[1]:
        result.append((_weight_gradient(x, weight, gradient, copies=copies),))
    return tuple(result)


def _weight_gradient(x: Tensor, weight: Tensor, gradient: Tensor, *, copies: bool) -> int | Formula:
    positions = gradient.numel() // gradient.shape[1]
    if _is_channels_last(x):
        return Formula("split sums", (positions, 0))
    if math.prod(weight.shape[2:]) == 1 and _is_aligned(x) and not copies:
        return int(x.shape[0] * weight.numel() * 4)  # one product for each sample, then their sum
    return Formula("split sums", (positions, _channels_last_bytes(x, weight, gradient.numel())))


def _padded_channels(x: Tensor, weight: Tensor) -> tuple[Group, ...]:
    """Channels last, but not a multiple of eight in half precision: copied with more channels."""
    if not _is_channels_last(x) or weight.shape[1] != x.shape[1]:
        return ()
    if x.dtype.itemsize > 2 or x.shape[1] % 8 == 0:
        return ()
    num_input = x.numel() // x.shape[1] * (-(-x.shape[1] // 8) * 8)
    return ((int(num_input + weight.numel()) * x.dtype.itemsize,),)


def _is_depthwise(x: Tensor, groups: int) -> bool:
    return groups > 1 and groups == x.shape[1]


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _is_aligned(x: Tensor) -> bool:
    return math.prod(x.shape[2:]) * x.dtype.itemsize % ALIGNED_BYTES == 0


def _copies(x: Tensor, weight: Tensor, stride: Any) -> bool:
    """Whether cuDNN copies to channels last; kernels of one position are plain products where they can be."""
    if _is_channels_last(x):
        return False
    if math.prod(weight.shape[2:]) == 1 and all(each == 1 for each in stride):
        odd = math.prod(x.shape[2:]) % 2 == 1
        return not _is_aligned(x) and (odd or min(weight.shape[:2]) >= WIDE)
    return True


def _channels_last_bytes(x: Tensor, weight: Tensor, num_output: int) -> int:
    channels = x.shape[1] if x.dtype.itemsize > 2 else -(-x.shape[1] // 8) * 8
    num_input = x.numel() // x.shape[1] * channels
    num_weights = weight.numel() if math.prod(weight.shape[2:]) > 1 else 0
    return int((num_input + num_output + num_weights) * x.dtype.itemsize)


def _output_elements(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool
) -> int:
    channels = weight.shape[1] if transposed else weight.shape[0]
    spatial = 1
    for size, kernel, step, pad, spread in zip(
        x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=False
    ):
        reach = spread * (kernel - 1)
        if transposed:
            spatial *= (size - 1) * step - 2 * pad + reach + 1
        else:
            spatial *= (size + 2 * pad - reach - 1) // step + 1
    return int(x.shape[0] * channels * spatial)
