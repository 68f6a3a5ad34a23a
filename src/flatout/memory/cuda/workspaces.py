"""Memory that a kernel takes during one operation, in addition to its results.

    reductions     partial sums, when few outputs are summed over many rows (the gradient of a bias)
    embeddings     the gradient of a table is summed in pieces after sorting the indices
    indices        values added at indices of a tensor (gradients of `x[rows, columns]`) are sorted by index
    softmax        the backward first multiplies gradient and result; the forward looks for rows that are
                   masked entirely; operands whose rows are not contiguous are copied
    transforms     a transform from complex to real numbers overwrites its input, so it gets a copy
    losses         squared and smooth losses are computed per element before they are averaged, and the
                   average keeps a block of that size; a loss of logits holds two values per element
    log-sum-exp    the exponents
    largest        the counts of digits by which blocks share the search of a long row
    affine grids   a product with the coordinates of all positions, which are written out
    rolls          one dimension at a time, each into its own tensor
    CTC            the backward walks the targets from their end, and keeps as much as the forward
    layer norms    rows must be contiguous: other layouts are copied first.  The gradients of weights of many
                   narrow rows are first summed by blocks of rows
    batch norms    a copy of a gradient whose layout differs from the input's, see `norms`
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

from flatout.memory.cuda import attention, convolutions, norms
from flatout.memory.cuda.formulas import ASSUMED_MULTIPROCESSORS, WARP, Formula

aten = torch.ops.aten
Group = tuple[int | Formula, ...]  # blocks that are held together
WorkspaceRule = Callable[[Any, Any], tuple[Group, ...]]

PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
    aten.vdot.default,
    aten._euclidean_dist.default,  # by way of one
    aten.affine_grid_generator.default,  # by way of one too
    aten.linalg_lu_solve.default,  # the gradient of a determinant; few small systems alone go elsewhere
    aten.linalg_solve_triangular.default,
    aten.mm.out,  # of compiled code, as are all that follow
    aten.addmm.out,
    aten.bmm.out,
    aten.baddbmm.out,
}
BIASED_PRODUCTS = (aten.addmm.default, aten.addmm.out)
# losses made for each element and then averaged in place -> the position of their argument `reduction`
REDUCTION = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
HOPPER = (9, 0)
PRODUCT_BYTES, HOPPER_PRODUCT_BYTES, EPILOGUE_BYTES = 8_519_680, 32 << 20, 1 << 20


class Workspaces:
    """Blocks that an operation takes besides its results, one group after the other.

    cuBLAS allocates a lasting block at the first product of each thread: one in the forward, one in the
    backward.  It allocates a small one at the first product of each that adds a bias (in the backward, if a
    forward is recomputed there).
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
        self._copies: dict[Any, WorkspaceRule] = {
            aten.native_layer_norm.default: _copy_in_one_piece,
            aten.native_layer_norm_backward.default: _layer_norm_copies,
            aten.native_batch_norm_backward.default: norms.batch_norm_backward_copy,
            aten._euclidean_dist.default: _distances,
            aten.roll.default: _roll,
            aten.index_put.default: _index_put,
            aten.affine_grid_generator.default: _base_grid,
            aten.upsample_bilinear2d_backward.default: _copy_of_strided_image,
            aten.convolution.default: convolutions.before_forward,
            aten.convolution_backward.default: convolutions.before_backward,
        }
        self._rules: dict[Any, WorkspaceRule] = {
            aten.sum.default: self._sum,
            aten.sum.dim_IntList: self._sum,
            aten.cumsum.default: _copy_to_sum,
            aten.cumprod.default: _copy_to_sum,
            aten.mean.dim: self._sum,
            aten.embedding_dense_backward.default: _embedding,
            aten._softmax.default: _copy_in_one_piece,
            aten._log_softmax.default: _copy_in_one_piece,
            aten._softmax_backward_data.default: _softmax_backward,
            aten._log_softmax_backward_data.default: _copies_of_both,
            aten._safe_softmax.default: _safe_softmax,
            aten.native_layer_norm_backward.default: self._layer_norm_backward,
            aten._fft_c2r.default: _copy_of_input,
            aten.mse_loss.default: _loss_by_element,
            aten.smooth_l1_loss.default: _loss_by_element,
            aten.huber_loss.default: _loss_by_element,
            aten.binary_cross_entropy_with_logits.default: _loss_of_logits,
            aten.logsumexp.default: _copy_of_input,
            aten.topk.default: self._largest,
            aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
            aten._ctc_loss_backward.default: _ctc_loss_backward,
            aten.convolution.default: convolutions.forward,
            aten.convolution_backward.default: partial(
                convolutions.backward, num_multiprocessors=self.num_multiprocessors
            ),
        }
        for func in attention.BACKWARDS:
            self._rules[func] = _attention_backward(func)

    def forget(self) -> None:
        """Begin as a process in which nothing was called."""
        self._taken.clear()

    def before(self, func: Any, args: Any, kwargs: Any) -> tuple[Group, ...]:
        """Return the blocks made before the results; the last group is held until the results are done."""
        rule = self._copies.get(func)
        return () if rule is None else rule(args, kwargs)

    def kept_bytes(self, func: Any, args: Any, kwargs: Any) -> int | None:
        """Return the bytes of a result's storage if it is larger than the result; else None.

        A loss that is averaged in place keeps its value for each element as long as it lives.
        """
        place = REDUCTION.get(func)
        return None if place is None else _element_bytes(args, kwargs, place)

    def of(self, func: Any, args: Any, kwargs: Any) -> tuple[Group, ...]:
        """Return the blocks taken after the results exist."""
        rule = self._rules.get(func)
        return () if rule is None else rule(args, kwargs)

    def lasting(self, func: Any, args: Any, *, in_backward: bool) -> tuple[int, ...]:
        """Return the blocks that the library takes with this operation and keeps."""
        if func not in PRODUCTS:
            return ()
        thread = "backward" if in_backward else "forward"
        wanted = {thread: self._product_bytes}
        if func in BIASED_PRODUCTS and _is_biased_in_one(*args[:3]):
            wanted[f"epilogue, {thread}"] = EPILOGUE_BYTES
        fresh = tuple(num_bytes for name, num_bytes in wanted.items() if name not in self._taken)
        self._taken.update(wanted)
        return fresh

    def _sum(self, args: Any, kwargs: Any) -> tuple[Group, ...]:
        copies = _copy_to_sum(args, kwargs)
        held = (*(copies[0] if copies else ()), *self._partial_sums(args))
        return (held,) if held else ()

    def _partial_sums(self, args: Any) -> Group:
        """Return the partial sums of a sum over slow dimensions: the gradient of a bias."""
        x, dims = args[0], args[1] if len(args) > 1 else None
        if not dims or not x.dim() or x.is_complex():
            return ()
        reduced = {dim % x.dim() for dim in dims}
        num_inputs = math.prod(x.shape[dim] for dim in reduced)
        fastest = min((dim for dim in range(x.dim()) if x.shape[dim] > 1), key=x.stride, default=None)
        if fastest is None or fastest in reduced:
            return ()
        numbers = (x.numel() // max(1, num_inputs), num_inputs, self.num_multiprocessors)
        # integers are summed in eight bytes, half precision in four
        itemsize = max(4, x.dtype.itemsize) if x.is_floating_point() else 8
        return (Formula("partial sums", (*numbers, _num_in_row(x, reduced), itemsize)),)

    def _largest(self, args: Any, kwargs: Any) -> tuple[Group, ...]:
        """Return the counts of digits by which several blocks share the search of a row."""
        x, dim = args[0], (args[2] if len(args) > 2 else kwargs.get("dim", -1))
        length = x.shape[dim] if x.dim() else 1
        counts = (x.numel() // max(1, length), length, self.num_multiprocessors)
        return ((Formula("counts of digits", counts),),)

    def _layer_norm_backward(self, args: Any, kwargs: Any) -> tuple[Group, ...]:
        """Return the sums by blocks of rows for weight and bias, then what summing those takes."""
        x, normalized, weight, mask = args[1], args[2], args[5], args[7]
        width = math.prod(normalized)
        if weight is None or not (mask[1] or mask[2]) or width // WARP >= self.num_multiprocessors // 2:
            return ()
        counts = (x.numel() // width, width)
        blocks = Formula("block sums", (*counts, weight.dtype.itemsize, self.num_multiprocessors))
        total = Formula("sums of blocks", (*counts, self.num_multiprocessors))
        return ((*(blocks for wanted in mask[1:] if wanted), total),)


def _num_in_row(x: Tensor, reduced: set[int]) -> int:
    """Return how many outputs of a sum lie in one row: those of dimensions inside every reduced one."""
    count = 1
    for dim in sorted((dim for dim in range(x.dim()) if x.shape[dim] > 1), key=x.stride):
        if dim in reduced:
            break
        count *= x.shape[dim]
    return count


def _is_biased_in_one(bias: Tensor, _: Tensor, weight: Tensor) -> bool:
    """Return whether cuBLASLt adds the bias: PyTorch asks it if neither side of the weight is one."""
    return bias.dim() == 1 and bool(weight.shape[0] > 1) and bool(weight.shape[1] > 1)


def _attention_backward(func: Any) -> WorkspaceRule:
    return lambda args, _kwargs: attention.backward_workspace(func, args)


def _embedding(args: Any, kwargs: Any) -> tuple[Group, ...]:
    gradient, indices, num_rows = args[0], args[1], args[2]
    count = indices.numel()
    order = Formula("sorted indices", (count,))
    copies = sum(_in_one_piece(gradient, indices), ())
    pieces = Formula("pieces of a table", (count, num_rows, gradient.shape[-1]))
    return ((*copies, order, order, order, pieces),)


def _index_put(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Add at indices: one linear index is made from all of them and sorted with its places."""
    indices = [each for each in args[1] if each is not None]
    adds = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not adds or any(each.dtype in (torch.bool, torch.uint8) for each in indices):
        return ()
    one = 8 * math.prod(torch.broadcast_shapes(*(each.shape for each in indices)))
    linear = [(one,) * min(2 + number, 3) for number in range(len(indices))]  # remainder, product, sum so far
    # the linear index, sorted, its places before and after, and what a radix sort writes between its passes
    sorting = (one, one, one, one, 2 * one)
    return (*linear, sum(_in_one_piece(args[2]), sorting))


def _copy_to_sum(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Return the copy of what is summed in another type: a mask is counted as integers of eight bytes.

    Half precision that is summed to single precision is read as it is.
    """
    x, dtype = args[0], kwargs.get("dtype")
    if dtype is None and not (x.is_floating_point() or x.is_complex()):
        dtype = torch.int64
    if dtype in (None, x.dtype) or (x.dtype in attention.HALF and dtype is torch.float32):
        return ()
    return ((x.numel() * dtype.itemsize,),)


def _softmax_backward(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Return the product of gradient and result, which lies as the gradient does, and copies in rows."""
    gradient, result = args[0], args[1]
    copies = (result.nbytes for each in (gradient, result) if not each.is_contiguous())
    return ((result.nbytes, *copies),)


def _copies_of_both(args: Any, kwargs: Any) -> tuple[Group, ...]:
    return _in_one_piece(args[0], args[1])


def _loss_by_element(args: Any, kwargs: Any) -> tuple[Group, ...]:
    num_bytes = _element_bytes(args, kwargs, 2)
    return ((num_bytes,),) if num_bytes is not None else ()


def _element_bytes(args: Any, kwargs: Any, place: int) -> int | None:
    """Return the bytes of a per-element loss; None when that is the result itself (reduction 0)."""
    x, target = args[0], args[1]
    if (args[place] if len(args) > place else kwargs.get("reduction", 1)) == 0:
        return None
    count = math.prod(torch.broadcast_shapes(x.shape, target.shape))
    return int(count * torch.promote_types(x.dtype, target.dtype).itemsize)


def _loss_of_logits(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Return the logarithms of sigmoids, those of a positive weight, and the loss by element if averaged."""
    x, positive = args[0], (args[3] if len(args) > 3 else kwargs.get("pos_weight"))
    by_element = (args[4] if len(args) > 4 else kwargs.get("reduction", 1)) != 0
    return ((x.nbytes,) * (1 + (positive is not None) + by_element),)


def _distances(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Return the squares to be summed, then both inputs with two more columns for one product."""
    left, right = args[0], args[1]
    sizes = [(x.numel() + 2 * x.numel() // x.shape[-1]) * x.dtype.itemsize for x in (left, right)]
    return ((left.nbytes,), (right.nbytes,), (left.nbytes, *sizes))


def _roll(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Return a contiguous copy if needed, then one result per dimension but the last."""
    x, dims = args[0], (args[2] if len(args) > 2 else kwargs.get("dims", ()))
    between = (x.nbytes,) * (len(dims) - 1)
    copy = _in_one_piece(x)
    return (*copy, between) if between else copy


def _base_grid(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Return the coordinates that the grid moves, each with a one after it."""
    theta, (batch_size, _channels, *sides) = args[0], args[1]
    return ((batch_size * math.prod(sides) * theta.shape[-1] * theta.dtype.itemsize,),)


def _copy_of_input(args: Any, kwargs: Any) -> tuple[Group, ...]:
    return ((args[0].nbytes,),)


def _ctc_loss_backward(args: Any, kwargs: Any) -> tuple[Group, ...]:
    return ((args[6].nbytes,),)


def _safe_softmax(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Return one byte for each score: whether it is minus infinity."""
    return ((args[0].numel(),),)


def _copy_of_strided_image(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Copy a gradient that lies neither in the usual order nor channels last, which have kernels."""
    return () if args[0].is_contiguous(memory_format=torch.channels_last) else _in_one_piece(args[0])


def _copy_in_one_piece(args: Any, kwargs: Any) -> tuple[Group, ...]:
    return _in_one_piece(args[0])


def _layer_norm_copies(args: Any, kwargs: Any) -> tuple[Group, ...]:
    return _in_one_piece(args[0], args[1])


def _in_one_piece(*tensors: Tensor) -> tuple[Group, ...]:
    """Return copies of the tensors that are not contiguous, held together."""
    copies = tuple(x.nbytes for x in tensors if not x.is_contiguous())
    return (copies,) if copies else ()
