"""What cuDNN takes for a convolution, held against allocations of single convolutions on an H200."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.memory.cuda import convolutions
from flatout.memory.cuda.formulas import Formula

aten = torch.ops.aten
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
NUM_MULTIPROCESSORS = 132


def meta(*shape: int, dtype: torch.dtype = BRAIN, channels_last: bool = False) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device="meta")
    return made.to(memory_format=torch.channels_last) if channels_last else made


def forward(x: Tensor, weight: Tensor, *, stride: int = 1, padding: int = 0, groups: int = 1) -> Any:
    num_dims = x.dim() - 2
    spans = ([stride] * num_dims, [padding] * num_dims, [1] * num_dims)
    return in_bytes(convolutions.forward((x, weight, None, *spans, False, [0] * num_dims, groups), {}))


def in_bytes(groups: Any) -> Any:
    """Blocks that grow in steps as what they are here."""
    return tuple(
        tuple(block.num_bytes if isinstance(block, Formula) else block for block in group) for group in groups
    )


def backward_args(
    x: Tensor,
    weight: Tensor,
    *,
    groups: int = 1,
    padding: int = 1,
    stride: int = 1,
    gradient: Tensor | None = None,
    bias: bool = False,
) -> Any:
    num_dims = x.dim() - 2
    spans = ([stride] * num_dims, [padding] * num_dims, [1] * num_dims)
    if gradient is None:
        gradient = aten.convolution(x, weight, None, *spans, False, [0] * num_dims, groups)
    return (gradient, x, weight, None, *spans, False, [0] * num_dims, groups, [True, True, bias])


def backward(x: Tensor, weight: Tensor, **options: Any) -> Any:
    args = backward_args(x, weight, **options)
    return in_bytes(convolutions.backward(args, {}, num_multiprocessors=NUM_MULTIPROCESSORS))


@pytest.mark.parametrize(
    ("dtype", "batch", "channels", "size", "kernel", "stride", "measured"),
    [
        (BRAIN, 8, 64, 56, 3, 1, 6_496_272),
        (BRAIN, 8, 3, 224, 7, 2, 19_317_776),  # padded to eight channels
        (HALF, 8, 3, 224, 7, 2, 16_081_424),  # to four
        (FULL, 8, 3, 224, 7, 2, 30_544_656),  # to none
    ],
)
def test_copies_are_as_large_as_measured(
    dtype: torch.dtype, batch: int, channels: int, size: int, kernel: int, stride: int, measured: int
) -> None:
    x, weight = (
        meta(batch, channels, size, size, dtype=dtype),
        meta(64, channels, kernel, kernel, dtype=dtype),
    )
    ((num_bytes,),) = forward(x, weight, stride=stride, padding=kernel // 2)
    assert num_bytes == pytest.approx(measured, rel=2e-3)


@pytest.mark.parametrize(("dtype", "channels"), [(FULL, 4), (BRAIN, 8)])
def test_patches_are_copied_with_channels_of_input_and_weight_padded(
    dtype: torch.dtype, channels: int
) -> None:
    """In float32 of a CLIP in evaluation and of a mixer, in bfloat16 of a ViT, as their peaks have it."""
    x, weight = meta(4, 3, 64, 64, dtype=dtype), meta(512, 3, 16, 16, dtype=dtype)
    ((num_bytes,),) = forward(x, weight, stride=16)
    values = 4 * channels * 64 * 64 + 4 * 512 * 4 * 4 + 512 * channels * 16 * 16
    assert num_bytes == pytest.approx(values * dtype.itemsize, abs=512)
    assert forward(meta(4, 3, 64, 64, dtype=dtype), meta(96, 3, 4, 4, dtype=dtype), stride=4) == ()


def test_a_transposed_convolution_to_an_image_pads_it_in_half_precision_and_copies_nothing_in_full() -> None:
    """The last layer of an autoencoder: 64 channels to 3, twice as large."""
    spans = ([2, 2], [1, 1], [1, 1])
    for dtype in (FULL, BRAIN):
        x, weight = meta(2, 64, 8, 8, dtype=dtype), meta(64, 3, 4, 4, dtype=dtype)
        gradient = meta(2, 3, 16, 16, dtype=dtype)
        found = convolutions.forward((x, weight, None, *spans, True, [0, 0], 1), {})
        args = (gradient, x, weight, None, *spans, True, [0, 0], 1, [True, True, False])
        of_input, of_weight = convolutions.backward(args, {}, num_multiprocessors=NUM_MULTIPROCESSORS)
        if dtype is FULL:
            assert (found, of_input, of_weight) == ((), (), ())
        else:
            padded = (x.numel() + 2 * 8 * 16 * 16 + weight.numel()) * 2
            assert found[0][0] == of_input[0] == pytest.approx(padded, abs=512)
            assert of_weight[0] > padded


def test_nothing_is_copied_that_lies_channels_last_or_is_a_plain_product() -> None:
    last = {"channels_last": True}
    assert forward(meta(8, 64, 56, 56, **last), meta(64, 64, 3, 3, **last)) == ()
    assert forward(meta(8, 64, 56, 56), meta(64, 64, 1, 1)) == ()
    assert forward(meta(8, 64, 56, 56), meta(64, 1, 3, 3), groups=64) == ()
    assert forward(meta(8, 3, 56, 56, dtype=FULL), meta(64, 3, 4, 4), stride=4) == ()


def test_an_image_of_few_channels_is_read_as_it_lies() -> None:
    assert forward(meta(8, 3, 56, 56), meta(64, 3, 3, 3), padding=1) == ()
    assert forward(meta(8, 3, 56, 56), meta(64, 3, 3, 3), padding=1, stride=2) == ()  # of an EfficientNet
    assert forward(meta(8, 3, 56, 56), meta(64, 3, 7, 7), padding=3, stride=2) != ()
    films = meta(2, 3, 8, 56, 56)
    assert forward(films, meta(32, 3, 3, 7, 7), padding=3, stride=2) == ()
    assert forward(films.to(HALF), meta(32, 3, 3, 7, 7, dtype=HALF), padding=3, stride=2) != ()


def test_a_weight_in_the_usual_order_is_turned_for_an_input_that_lies_channels_last() -> None:
    x, weight = meta(8, 64, 28, 28, channels_last=True), meta(128, 64, 2, 2)
    assert forward(x, weight, stride=2) == ((2 * weight.numel(),),)


def test_few_channels_that_lie_channels_last_are_padded_in_half_precision() -> None:
    x, weight = meta(8, 3, 56, 56, channels_last=True), meta(64, 3, 3, 3, channels_last=True)
    ((num_bytes,),) = forward(x, weight)
    assert num_bytes == 2 * (8 * 8 * 56 * 56 + weight.numel()) + convolutions.HEAD_BYTES
    wide = meta(8, 3, 56, 56, dtype=FULL, channels_last=True)
    assert forward(wide, meta(64, 3, 3, 3, dtype=FULL, channels_last=True)) == ()


def test_strides_and_padding_size_the_copy_of_the_output() -> None:
    x, weight = meta(2, 16, 20, 20), meta(32, 16, 3, 3)
    ((num_bytes,),) = forward(x, weight, stride=2, padding=1)
    assert num_bytes == 2 * (x.numel() + 2 * 32 * 10 * 10 + weight.numel()) + convolutions.HEAD_BYTES


def test_a_backward_copies_for_the_input_and_then_sums_for_the_weight() -> None:
    x, weight = meta(32, 64, 56, 56), meta(64, 64, 3, 3)
    copies = 2 * (2 * x.numel() + weight.numel()) + convolutions.HEAD_BYTES
    parts = 13 * weight.numel() * 4
    assert backward(x, weight) == ((copies,), (copies + parts,))
    assert parts == pytest.approx(1_917_591, rel=1e-3)  # as measured
    last, kernel = meta(32, 64, 56, 56, channels_last=True), meta(64, 64, 3, 3, channels_last=True)
    assert backward(last, kernel, gradient=last) == ((), (parts,))
    assert backward(x, meta(64, 64, 1, 1), padding=0) == ((), (32 * 64 * 64 * 4,))


def test_several_tiles_are_shared_by_all_multiprocessors() -> None:
    """As recorded of a 3 x 3 and a 4 x 4 kernel in float32: 7 and 4 of 132."""
    for kernel, shares in ((3, 7), (4, 4)):
        x, weight = (
            meta(2, 128, 32, 32, dtype=torch.float32),
            meta(256, 128, kernel, kernel, dtype=torch.float32),
        )
        (copied,), (summed,) = backward(x, weight)
        assert summed - copied == shares * weight.numel() * 4


def test_an_image_out_has_as_many_channels_as_a_load_takes() -> None:
    x, weight = meta(64, 128, 128, 128, dtype=torch.float32), meta(3, 128, 3, 3, dtype=torch.float32)
    ((num_bytes,),) = forward(x, weight, padding=1)
    assert num_bytes == 4 * (x.numel() + 64 * 4 * 128 * 128 + weight.numel()) + convolutions.HEAD_BYTES
    assert num_bytes == pytest.approx(553_666_707, rel=1e-4)  # as recorded


def test_a_gradient_in_another_order_is_copied_once_for_all() -> None:
    x, weight = meta(32, 64, 56, 56), meta(64, 64, 3, 3)
    turned = meta(32, 128, 56, 56)[:, :64]  # a part of a wider tensor, as a joined input leaves it
    assert backward(x, weight) == backward(x, weight, gradient=turned)
    before = convolutions.before_backward
    assert before(backward_args(x, weight), {}) == ()
    assert before(backward_args(x, weight, gradient=turned), {}) == ((2 * turned.numel(),),)


@pytest.mark.parametrize(
    ("shape", "weight", "stride", "measured"),
    [
        ((32, 64, 56, 56), (64, 64, 3, 3), 1, 25_837_584),  # without the result
        ((128, 64, 56, 56), (64, 64, 3, 3), 1, 205_668_499),  # with it
        ((8, 64, 4096), (128, 64, 3), 1, 8_486_928),
        ((8, 512, 4096), (512, 512, 3), 1, 137_363_603),
        ((8, 64, 14, 14, 14), (64, 64, 3, 3, 3), 1, 6_062_096),
        ((128, 256, 56, 56), (512, 256, 1, 1), 2, 411_566_096),
        ((128, 512, 28, 28), (1024, 512, 1, 1), 2, 308_281_491),
    ],
)
def test_float32_results_of_few_channels_in_are_written_as_they_lie(
    shape: tuple[int, ...], weight: tuple[int, ...], stride: int, measured: int
) -> None:
    padding = (weight[-1] - 1) // 2
    kernel = meta(*weight, dtype=FULL)
    ((num_bytes,),) = forward(meta(*shape, dtype=FULL), kernel, stride=stride, padding=padding)
    assert num_bytes == pytest.approx(measured, rel=1e-4)


@pytest.mark.parametrize(
    ("dtype", "batch", "side", "num_in", "num_out", "of_input", "of_weight"),
    [
        (FULL, 32, 28, 40, 240, 0, 32 * 40 * 240 * 4),
        (FULL, 32, 7, 192, 1152, 0, 28_311_552),
        (FULL, 32, 7, 320, 1280, 10_035_216, 13_967_775),
        (FULL, 128, 14, 256, 1024, 0, 136_839_791),
        (FULL, 32, 56, 24, 144, 0, 68_838_955),
        (BRAIN, 64, 7, 320, 1280, 0, 104_857_600),
        (BRAIN, 64, 7, 1152, 192, 0, 8_429_584),
        (BRAIN, 64, 14, 112, 672, 0, 19_267_584),
        (BRAIN, 128, 7, 512, 2048, 32_112_656, 32_112_656),
        (BRAIN, 64, 1, 48, 1152, 0, 0),
    ],
)
def test_kernels_of_one_position_are_products_as_recorded(
    dtype: torch.dtype, batch: int, side: int, num_in: int, num_out: int, of_input: int, of_weight: int
) -> None:
    """Of ResNet and EfficientNet; copies with partial sums within a fifth."""
    x, weight = meta(batch, num_in, side, side, dtype=dtype), meta(num_out, num_in, 1, 1, dtype=dtype)
    first, second = (sum(group) for group in backward(x, weight, padding=0))
    assert first == pytest.approx(of_input, rel=1e-4)
    assert second == pytest.approx(of_weight, rel=0.2)


def test_a_product_that_is_not_aligned_is_copied_forward_where_it_is_odd_or_wide() -> None:
    for channels, side, copied in ((192, 7, True), (192, 14, False), (512, 14, True), (512, 28, False)):
        found = forward(meta(4, channels, side, side), meta(channels, channels, 1, 1))
        assert bool(found) is copied
    assert forward(meta(4, 320, 7, 7, dtype=FULL), meta(1280, 320, 1, 1, dtype=FULL)) == ()


@pytest.mark.parametrize(("num_in", "num_out", "tiles"), [(512, 256, 66), (512, 512, 132), (1024, 1024, 0)])
def test_tiles_that_fill_the_multiprocessors_badly_are_shared_out(
    num_in: int, num_out: int, tiles: int
) -> None:
    """As recorded of 3 x 3 kernels of a U-Net in float32."""
    x, weight = meta(4, num_in, 40, 40, dtype=FULL), meta(num_out, num_in, 3, 3, dtype=FULL)
    (copied,), (summed,) = backward(x, weight)
    assert summed - copied == tiles * 128 * 128 * 4


@pytest.mark.parametrize(
    ("dtype", "batch", "measured"),
    [(FULL, 128, 519_873_680), (BRAIN, 128, 314_453_136), (FULL, 32, 134_522_000)],
)
def test_the_weight_of_an_image_is_shared_by_most_multiprocessors(
    dtype: torch.dtype, batch: int, measured: int
) -> None:
    """The first layer of a ResNet: 120 and 61 shares of its padded weight."""
    x, weight = meta(batch, 3, 224, 224, dtype=dtype), meta(64, 3, 7, 7, dtype=dtype)
    _of_input, (num_bytes,) = backward(x, weight, padding=3, stride=2)
    assert num_bytes == pytest.approx(measured, rel=5e-3)


def test_results_that_lie_channels_last_are_padded_to_what_is_written_at_once() -> None:
    """150 classes of a Segformer."""
    x, weight = meta(16, 256, 64, 64, channels_last=True), meta(150, 256, 1, 1, channels_last=True)
    assert forward(x, weight) == ((20_000_784,),)


@pytest.mark.parametrize(
    ("dtype", "batch", "channels", "size", "kernel", "measured"),
    [
        (BRAIN, 32, 384, 14, 7, 19_267_584),  # of the bias
        (BRAIN, 16, 256, 32, 3, 33_554_432),
        (BRAIN, 16, 256, 32, 3, 1_179_648),
        (BRAIN, 8, 96, 56, 7, 1_204_224),
        (FULL, 8, 96, 56, 7, 87_008_887),
    ],
)
def test_a_depthwise_backward_that_lies_channels_last_is_cudnn(
    dtype: torch.dtype, batch: int, channels: int, size: int, kernel: int, measured: int
) -> None:
    x = meta(batch, channels, size, size, dtype=dtype, channels_last=True)
    weight = meta(channels, 1, kernel, kernel, dtype=dtype)
    groups = backward(x, weight, groups=channels, padding=kernel // 2, gradient=x, bias=True)
    found = [num_bytes for group in groups for num_bytes in group]
    assert any(num_bytes == pytest.approx(measured, rel=1e-4) for num_bytes in found)


def test_a_small_depthwise_kernel_is_not_transformed() -> None:
    """The peaks of a pyramid vision transformer at three batches have no block for it."""
    x = meta(8, 256, 56, 56, dtype=FULL, channels_last=True)
    of_input, of_weight = backward(x, meta(256, 1, 3, 3, dtype=FULL), groups=256, gradient=x)
    assert of_input == of_weight == ()


@pytest.mark.parametrize(
    ("batch", "num_in", "num_out", "side", "measured"),
    [
        (64, 64, 64, 16, 75_497_472),
        (128, 65, 64, 16, 152_109_056),
        (64, 96, 24, 16, 68_419_584),
        (64, 96, 24, 32, 265_814_016),
    ],
)
def test_many_samples_have_the_gradient_of_a_small_weight_from_transforms(
    batch: int, num_in: int, num_out: int, side: int, measured: int
) -> None:
    """As recorded of an inner loop, a differential equation and joined features in float32."""
    x, weight = meta(batch, num_in, side, side, dtype=FULL), meta(num_out, num_in, 3, 3, dtype=FULL)
    assert backward(x, weight)[1] == (measured,)


@pytest.mark.parametrize(
    ("batch", "num_channels", "side"), [(32, 64, 16), (64, 128, 16), (64, 64, 56), (64, 64, 24), (64, 64, 12)]
)
def test_few_samples_large_weights_and_other_sides_are_not_transformed(
    batch: int, num_channels: int, side: int
) -> None:
    x = meta(batch, num_channels, side, side, dtype=FULL)
    _of_input, (of_weight,) = backward(x, meta(num_channels, num_channels, 3, 3, dtype=FULL))
    assert of_weight < 4 * x.nbytes  # transforms take more than eight times as much


def test_very_many_samples_are_not_transformed() -> None:
    """As recorded of 480 images of 32 x 32: the transforms would take 1.3 and 2.1 GiB."""
    for num_in in (16, 64):
        x, weight = meta(480, num_in, 32, 32, dtype=FULL), meta(64, num_in, 3, 3, dtype=FULL)
        assert backward(x, weight)[1][0] < 300 << 20


def test_an_input_that_is_a_part_of_another_is_copied_in_both_directions() -> None:
    """PyTorch makes it dense before it asks cuDNN: sequences in the usual order, images as they lie."""
    sequence, kernel = meta(8, 249, 512).transpose(1, 2), meta(512, 32, 128)
    half, square = meta(16, 64, 26, 26)[:, :32], meta(32, 32, 3, 3)
    last = meta(4, 192, 16, 16, channels_last=True)
    for x, weight in ((sequence, kernel), (half, square), (last[:, :96], meta(96, 96, 3, 3))):
        assert convolutions.before_forward((x, weight), {}) == ((x.numel() * 2,),)
        gradient = x.contiguous()
        args = (gradient, x, weight, *(None,) * 6, 1)
        assert convolutions.before_backward(args, {})[0][0] == x.numel() * 2
    for x, weight in ((half.contiguous(), square), (last, meta(96, 192, 3, 3))):
        assert convolutions.before_forward((x, weight), {}) == ()


def test_many_weights_are_multiplied_by_sample_where_tiles_are_few_or_samples_long() -> None:
    """The peaks of a network for speakers, of a ResNet and of one that shuffles channels."""
    for dtype, channels, shape, by_sample in (
        (FULL, 1536, (200,), True),
        (FULL, 1024, (14, 14), False),
        (BRAIN, 768, (200,), True),
        (BRAIN, 1536, (200,), False),
    ):
        found = backward(
            meta(64, channels, *shape, dtype=dtype),
            meta(channels, channels, *(1,) * len(shape), dtype=dtype),
            padding=0,
        )[1]
        assert (found == (64 * channels * channels * 4,)) is by_sample


def test_a_depthwise_convolution_in_the_usual_order_takes_nothing() -> None:
    assert backward(meta(8, 64, 56, 56), meta(64, 1, 3, 3), groups=64, bias=True) == ((), (), ())


@pytest.mark.parametrize(
    ("dtype", "shape", "weight"),
    [
        (HALF, (512, 1599), (512, 512, 3)),  # tiles that the fewer share, the fewer positions there are
        (FULL, (64, 56, 56), (64, 64, 3, 3)),  # written as they lie until there are many
        (FULL, (24, 56, 56), (144, 24, 1, 1)),  # by sample where there are many
        (FULL, (64, 32, 32), (64, 64, 3, 3)),  # by transforms where there are many
    ],
)
def test_what_a_kernel_chooses_by_the_batch_is_the_same_in_a_replay(
    dtype: torch.dtype, shape: tuple[int, ...], weight: tuple[int, ...]
) -> None:
    def blocks(batch: int) -> list[Any]:
        x, kernel = meta(batch, *shape, dtype=dtype), meta(*weight, dtype=dtype)
        num_dims = x.dim() - 2
        spans = ([1] * num_dims, [0] * num_dims, [1] * num_dims)
        args = (x, kernel, None, *spans, False, [0] * num_dims, 1)
        groups = convolutions.forward(args, {})
        groups += convolutions.backward(
            backward_args(x, kernel, padding=0), {}, num_multiprocessors=NUM_MULTIPROCESSORS
        )
        return [block for group in groups for block in group]

    few, more, most = (blocks(batch) for batch in (8, 16, 200))
    assert any(isinstance(block, Formula) for block in few)
    for first, second, wanted in zip(few, more, most, strict=True):
        if isinstance(first, Formula):
            counts = [a + (b - a) * 24 for a, b in zip(first.counts, second.counts, strict=True)]
            assert first._replace(counts=tuple(counts)) == wanted
        else:
            assert first + (second - first) * 24 == wanted
