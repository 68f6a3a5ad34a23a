"""What kernels take beside their results: cuBLAS, cuDNN, sums, embeddings, softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.memory.cuda import attention
from flatout.memory.cuda.formulas import Formula
from flatout.memory.cuda.workspaces import Workspaces

aten = torch.ops.aten
MIB = 1 << 20


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_the_gradient_of_a_bias_is_summed_in_parts() -> None:
    spaces = Workspaces(num_multiprocessors=100)
    x = meta(64, 512, 3072)
    ((formula,),) = spaces.of(aten.sum.dim_IntList, (x, [0, 1]), {})
    assert formula == Formula("partial sums", (3072, 32768, 100, 3072, 4))
    assert spaces.of(aten.sum.dim_IntList, (x, [2]), {}) == ()  # along the fastest dimension
    assert spaces.of(aten.sum.dim_IntList, (x, []), {}) == ()


def test_the_gradient_of_a_table_sorts_its_indices() -> None:
    args = (meta(64, 512, 768), meta(64, 512, dtype=torch.long), 30522, -1, False)
    ((*order, pieces),) = Workspaces().of(aten.embedding_dense_backward.default, args, {})
    assert [block.num_bytes for block in order] == [8 * 32768] * 3
    assert pieces.num_bytes == 103_827_456


def test_integers_are_summed_in_parts_of_eight_bytes() -> None:
    """As recorded of soft trees: a mask of 1114 x 512 x 6 takes 54 MiB, copy and parts."""
    mask = meta(1114, 512, 6, dtype=torch.bool)
    ((copy, parts),) = Workspaces(num_multiprocessors=132).of(aten.sum.dim_IntList, (mask, [0]), {})
    assert copy == 8 * mask.numel()
    assert copy + parts.num_bytes > 1.8 * copy


def test_the_gradient_of_a_table_is_copied_if_it_is_a_part_of_another() -> None:
    part = meta(8, 512, 768)[:, :, :128]
    args = (part, meta(8, 512, dtype=torch.long), 1024, -1, False)
    ((copy, *_rest),) = Workspaces().of(aten.embedding_dense_backward.default, args, {})
    assert copy == 8 * 512 * 128 * 2


def test_a_loss_of_logits_holds_two_values_for_each() -> None:
    """The logarithms of sigmoids and the loss of each; one more for a positive weight, one less alone."""
    x, loss = meta(64, 1024), aten.binary_cross_entropy_with_logits.default
    of = Workspaces().of
    assert of(loss, (x, x), {}) == ((x.nbytes, x.nbytes),)
    assert of(loss, (x, x, None, meta(1024)), {}) == ((x.nbytes,) * 3,)
    assert of(loss, (x, x, None, None, 0), {}) == ((x.nbytes,),)


def test_the_logarithm_of_a_sum_of_exponents_holds_the_exponents() -> None:
    """As recorded of a large vocabulary in chunks: 250 MiB of 1024 x 64000 values."""
    x = meta(1024, 64_000, dtype=torch.float32)
    assert Workspaces().of(aten.logsumexp.default, (x, [-1]), {}) == ((250 * MIB,),)


def test_the_largest_of_many_long_rows_are_sought_by_counting_digits() -> None:
    """As recorded of nearest points: 16 and 32 MiB for 32 x 1024 rows of 1024; short rows take nothing."""
    largest = Workspaces(num_multiprocessors=132).of

    def num_bytes(*shape: int) -> int:
        ((block,),) = largest(aten.topk.default, (meta(*shape), 20, -1), {})
        assert isinstance(block, Formula)
        return block.num_bytes

    assert num_bytes(32, 1024, 1024) == 48 * MIB
    assert num_bytes(32, 1024, 300) == num_bytes(64, 1000) == 0


def test_the_gradient_of_an_enlarged_image_is_copied_only_if_it_is_a_part() -> None:
    enlarged = aten.upsample_bilinear2d_backward.default
    before = Workspaces().before
    image = meta(8, 32, 16, 16)
    assert before(enlarged, (image,), {}) == ()
    assert before(enlarged, (image.to(memory_format=torch.channels_last),), {}) == ()
    assert before(enlarged, (image[:, :8],), {}) == ((8 * 8 * 16 * 16 * 2,),)


def test_adding_at_indices_sorts_them() -> None:
    table, rows, columns = meta(64, 32, 2), meta(10, 1, dtype=torch.long), meta(1, 7, dtype=torch.long)
    one = 8 * 70
    before = Workspaces().before
    args = (table, [rows, columns], meta(10, 7, 2), True)
    assert before(aten.index_put.default, args, {}) == (
        (one, one),
        (one, one, one),
        (one, one, one, one, 2 * one),
    )
    turned = meta(2, 7, 10).permute(2, 1, 0)  # is copied first, and the copy is held
    assert before(aten.index_put.default, (*args[:2], turned, True), {})[-1][-1] == 2 * 2 * 70
    assert before(aten.index_put.default, args[:3], {}) == ()  # values are written, not added


def test_the_backward_of_softmax_holds_a_product() -> None:
    x = meta(4, 8, 16)
    assert Workspaces().of(aten._softmax_backward_data.default, (x, x, -1, x.dtype), {}) == (
        (2 * x.numel(),),
    )


def test_the_backward_of_softmax_copies_what_does_not_lie_in_rows() -> None:
    """Seen where scores come from a product of turned tensors: 64 MiB more at the full batch."""
    x = meta(4, 8, 16)
    turned = meta(4, 16, 8).transpose(1, 2)
    for gradient, result, count in ((turned, x, 2), (x, turned, 2), (turned, turned, 3)):
        (group,) = Workspaces().of(aten._softmax_backward_data.default, (gradient, result, -1, x.dtype), {})
        assert group == (x.nbytes,) * count
        copies = Workspaces().of(aten._log_softmax_backward_data.default, (gradient, result, -1, x.dtype), {})
        assert copies == ((x.nbytes,) * (count - 1),)


@pytest.mark.parametrize("func", [aten.sum.default, aten.sum.dim_IntList, aten.cumsum.default])
def test_what_is_summed_in_another_type_is_copied_first(func: Any) -> None:
    """A mask of a maximum over 128 x 1000 x 256 takes 250 MiB so."""

    def copied(of: torch.dtype, **kwargs: Any) -> Any:
        rest = ([1],) if func is aten.sum.dim_IntList else (1,) if func is aten.cumsum.default else ()
        return Workspaces().of(func, (meta(4, 64, dtype=of), *rest), kwargs)

    assert copied(torch.bool) == copied(torch.int32) == ((8 * 256,),)
    assert copied(torch.int64) == copied(torch.float32) == ()
    assert copied(torch.float32, dtype=torch.float64) == ((8 * 256,),)
    assert copied(torch.bfloat16, dtype=torch.float32) == ()


def test_a_loss_is_taken_for_each_element_before_it_is_averaged() -> None:
    x, target = meta(8, 3, 16), meta(8, 1, 16, dtype=torch.float32)
    of = Workspaces().of
    assert of(aten.mse_loss.default, (x, target), {}) == ((4 * x.numel(),),)
    assert of(aten.huber_loss.default, (x, x, 2), {}) == ((2 * x.numel(),),)
    assert of(aten.mse_loss.default, (x, target, 0), {}) == ()


def test_distances_are_a_product_of_inputs_with_two_columns_more() -> None:
    left, right = meta(64, 10, dtype=torch.float32), meta(8, 10, dtype=torch.float32)
    squares, others, held = Workspaces().before(aten._euclidean_dist.default, (left, right), {})
    assert (squares, others) == ((4 * 640,), (4 * 80,))
    assert held == (4 * 640, 4 * 64 * 12, 4 * 8 * 12)


def test_a_transform_to_real_numbers_reads_a_copy() -> None:
    waves = meta(4, 32, 17, dtype=torch.complex64)
    assert Workspaces().of(aten._fft_c2r.default, (waves, [1, 2], 2, 32), {}) == ((8 * waves.numel(),),)


def test_the_backward_of_a_ctc_loss_keeps_as_much_as_its_forward() -> None:
    x, ids, kept = meta(50, 4, 32, dtype=torch.float32), meta(4, 9), meta(4, 50, 19, dtype=torch.float32)
    args = (x, x, ids, ids, ids, x, kept, 0)
    assert Workspaces().of(aten._ctc_loss_backward.Tensor, args, {}) == ((4 * kept.numel(),),)


def test_a_softmax_that_seeks_masked_rows_holds_a_byte_for_each_score() -> None:
    x = meta(4, 8, 16)
    assert Workspaces().of(aten._safe_softmax.default, (x, -1), {}) == ((x.numel(),),)


def test_a_layer_norm_copies_what_does_not_lie_in_rows() -> None:
    x, turned = meta(8, 14, 14, 96), meta(8, 96, 14, 14).permute(0, 2, 3, 1)
    forward, backward = aten.native_layer_norm.default, aten.native_layer_norm_backward.default
    assert Workspaces().before(forward, (x, [96], None, None, 1e-6), {}) == ()
    assert Workspaces().before(forward, (turned, [96], None, None, 1e-6), {}) == ((2 * x.numel(),),)
    assert Workspaces().before(backward, (turned, turned, [96]), {}) == ((2 * x.numel(), 2 * x.numel()),)


@pytest.mark.parametrize(
    ("num_rows", "width", "measured"),
    [
        (128 * 28 * 28, 192, (2_408_448, 2_408_448, 4_816_896)),  # the second and the first stage of a Swin
        (128 * 56 * 56, 96, (4_194_048, 4_194_048, 2_113_536)),
        (65_536, 192, (0, 0, 0)),
    ],
)
def test_the_weight_of_a_layer_norm_of_many_rows_is_summed_by_blocks(
    num_rows: int, width: int, measured: tuple[int, ...]
) -> None:
    x, weight = meta(num_rows, width), meta(width, dtype=torch.float32)
    backward = aten.native_layer_norm_backward.default
    args = (x, x, [width], None, None, weight, weight, [True, True, True])
    (group,) = Workspaces(num_multiprocessors=132).of(backward, args, {})
    assert tuple(block.num_bytes for block in group) == measured
    without_bias = (*args[:7], [True, True, False])
    assert len(Workspaces().of(backward, without_bias, {})[0]) == 2
    assert Workspaces().of(backward, (x, x, [width], None, None, None, None, [True, False, False]), {}) == ()


def test_an_affine_grid_writes_its_places_out_and_takes_a_product() -> None:
    args = (meta(4, 2, 3, dtype=torch.float32), [4, 3, 16, 8], False)
    assert Workspaces().before(aten.affine_grid_generator.default, args, {}) == ((4 * 16 * 8 * 3 * 4,),)
    assert Workspaces().lasting(aten.affine_grid_generator.default, (), in_backward=False) == (32 * MIB,)


def test_a_roll_goes_along_one_dimension_at_a_time() -> None:
    x = meta(4, 8, 8, 16)
    before = Workspaces().before
    assert before(aten.roll.default, (x, [1], [1]), {}) == ()
    assert before(aten.roll.default, (x, [1, 1], [1, 2]), {}) == ((2 * x.numel(),),)
    turned = x.transpose(1, 3)
    assert before(aten.roll.default, (turned, [1, 1], [1, 2]), {}) == ((2 * x.numel(),),) * 2


def test_a_softmax_copies_what_does_not_lie_in_rows() -> None:
    x = meta(4, 16, 8, 8)
    for func in (aten._softmax.default, aten._log_softmax.default):
        assert Workspaces().of(func, (x, 1, False), {}) == ()
        turned = x.to(memory_format=torch.channels_last)
        assert Workspaces().of(func, (turned, 1, False), {}) == ((2 * x.numel(),),)


@pytest.mark.parametrize(
    ("loss", "func"),
    [
        (F.mse_loss, aten.mse_loss.default),
        (F.smooth_l1_loss, aten.smooth_l1_loss.default),
        (F.binary_cross_entropy, aten.binary_cross_entropy.default),
        (F.huber_loss, aten.huber_loss.default),
    ],
)
def test_a_loss_keeps_what_pytorch_itself_keeps_of_its_elements(loss: Any, func: Any) -> None:
    x = torch.rand(50, 30)
    shown = loss(x, x)
    kept = Workspaces().kept_bytes(func, (x, x), {})
    assert shown.untyped_storage().nbytes() == (kept or shown.dtype.itemsize)
    assert Workspaces().kept_bytes(func, (x, x), {"reduction": 0}) is None


def test_the_weight_gradient_of_a_convolution_depends_on_the_gpu() -> None:
    x, weight = meta(8, 64, 56, 56), meta(64, 64, 3, 3)
    args = (x, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    small, large = (
        Workspaces(num_multiprocessors=count).of(aten.convolution_backward.default, args, {})
        for count in (40, 132)
    )
    assert large[0][0] - small[0][0] == (13 - 4) * weight.numel() * 4


@pytest.mark.parametrize("func", sorted(attention.BACKWARDS, key=str))
def test_each_attention_has_its_own_accumulators(func: Any) -> None:
    x = meta(4, 8, 512, 64)
    assert Workspaces().of(func, (x, x, x), {}) == attention.backward_workspace(func, (x, x, x))


def test_other_operations_take_nothing() -> None:
    assert Workspaces().of(aten.add.Tensor, (meta(4), meta(4)), {}) == ()
    assert Workspaces().lasting(aten.add.Tensor, (), in_backward=False) == ()


def linear(num_out: int) -> tuple[Tensor, ...]:
    """The arguments of a layer's product: bias, input, weight."""
    return meta(num_out), meta(2, 8), meta(8, num_out)


def test_a_bias_of_one_number_is_added_without_a_block_for_it() -> None:
    spaces = Workspaces()
    assert spaces.lasting(aten.addmm.default, linear(1), in_backward=False) == (32 * MIB,)
    assert spaces.lasting(aten.addmm.default, linear(2), in_backward=False) == (MIB,)


@pytest.mark.parametrize(
    ("capability", "num_bytes"),
    [((9, 0), 32 * MIB), (None, 32 * MIB), ((10, 0), 32 * MIB), ((8, 0), 8_519_680), ((12, 0), 8_519_680)],
)
def test_products_take_a_block_once_for_each_direction(
    capability: tuple[int, int] | None, num_bytes: int
) -> None:
    spaces = Workspaces(compute_capability=capability)
    assert spaces.lasting(aten.mm.default, (), in_backward=False) == (num_bytes,)
    assert spaces.lasting(aten.bmm.default, (), in_backward=False) == ()
    assert spaces.lasting(aten.addmm.default, linear(4), in_backward=True) == (num_bytes, MIB)
    assert spaces.lasting(aten.addmm.default, linear(4), in_backward=False) == (MIB,)
    assert spaces.lasting(aten.addmm.default, linear(4), in_backward=True) == ()


@pytest.mark.parametrize(
    "func",
    [aten.mv.default, aten.dot.default, aten._euclidean_dist.default, aten.linalg_lu_solve.default],
)
def test_whatever_goes_to_cublas_takes_its_block(func: Any) -> None:
    assert Workspaces().lasting(func, (), in_backward=False) == (32 * MIB,)
