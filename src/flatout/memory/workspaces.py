"""Memory that a kernel takes for the time of one operation, beside its results.

    reductions     partial sums, when few outputs are summed over many rows (the gradient of a bias)
    embeddings     the gradient of a table is summed in pieces after sorting the indices
    softmax        its backward multiplies gradient and result first; rows that are masked wholly are sought
    transforms     from complex to real numbers overwrite what they read, so they read a copy
    losses         squared and smooth ones are taken for each element before they are averaged
    CTC            its backward walks the targets from their end, and keeps as much as the forward did
    layer norms    read rows in one piece: what lies otherwise is copied first
    convolutions   see `convolutions`
    attention      accumulators, see `attention`

The formulas follow PyTorch's kernels and were checked against allocations on an H200 (torch 2.11).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.memory import attention, convolutions
from flatout.memory.formulas import Formula

aten = torch.ops.aten
Group = tuple[int | Formula, ...]  # blocks that are held together

PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
BIASED_PRODUCT = aten.addmm.default
# which copy what does not lie in rows before they make their results
COPIES_FIRST = {
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten._euclidean_dist.default,
}
HOPPER = (9, 0)
ASSUMED_MULTIPROCESSORS = 132  # of an H200: where a GPU's own are not known
PRODUCT_BYTES, HOPPER_PRODUCT_BYTES, EPILOGUE_BYTES = 8_519_680, 32 << 20, 1 << 20


class Workspaces:
    """Blocks that an operation takes beside its results, one group of them after the other.

    cuBLAS takes a block for good with the first product of each thread: one in the forward, one in the
    backward; and a small one with the first product that adds a bias.
    """

    def __init__(
        self, *, compute_capability: tuple[int, int] | None = None, num_multiprocessors: int | None = None
    ) -> None:
        self.num_multiprocessors = num_multiprocessors or ASSUMED_MULTIPROCESSORS
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
            aten._safe_softmax.default: _safe_softmax,
            aten.native_layer_norm.default: _layer_norm,
            aten.native_layer_norm_backward.default: _layer_norm_backward,
            aten._fft_c2r.default: _copy_of_input,
            aten.mse_loss.default: _loss_by_element,
            aten.smooth_l1_loss.default: _loss_by_element,
            aten.huber_loss.default: _loss_by_element,
            aten._euclidean_dist.default: _distances,
            aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
            aten._ctc_loss_backward.default: _ctc_loss_backward,
            aten.convolution.default: convolutions.forward,
            aten.convolution_backward.default: partial(
                convolutions.backward, num_multiprocessors=self.num_multiprocessors
            ),
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


def _loss_by_element(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Nothing beside the result where that has every element's loss (reduction 0)."""
    x, target = args[0], args[1]
    if (args[2] if len(args) > 2 else kwargs.get("reduction", 1)) == 0:
        return ()
    count = math.prod(torch.broadcast_shapes(x.shape, target.shape))
    return ((count * torch.promote_types(x.dtype, target.dtype).itemsize,),)


def _distances(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Squares to be summed, then both inputs with two columns more, of which one product is taken."""
    left, right = args[0], args[1]
    sizes = [(x.numel() + 2 * x.numel() // x.shape[-1]) * x.dtype.itemsize for x in (left, right)]
    return ((_bytes_of(left),), (_bytes_of(right),), (_bytes_of(left), *sizes))


def _copy_of_input(args: Any, kwargs: Any) -> tuple[Group, ...]:
    return ((_bytes_of(args[0]),),)


def _bytes_of(x: Tensor) -> int:
    return x.numel() * x.dtype.itemsize


def _ctc_loss_backward(args: Any, kwargs: Any) -> tuple[Group, ...]:
    kept = args[6]
    return ((kept.numel() * kept.dtype.itemsize,),)


def _safe_softmax(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """One byte for each score that says whether it is minus infinity."""
    return ((args[0].numel(),),)


def _layer_norm(args: Any, kwargs: Any) -> tuple[Group, ...]:
    return _in_one_piece(args[0])


def _layer_norm_backward(args: Any, kwargs: Any) -> tuple[Group, ...]:
    return _in_one_piece(args[0], args[1])


def _in_one_piece(*tensors: Tensor) -> tuple[Group, ...]:
    """Copies of those that are not contiguous, held together."""
    copies = tuple(x.numel() * x.dtype.itemsize for x in tensors if not x.is_contiguous())
    return (copies,) if copies else ()
