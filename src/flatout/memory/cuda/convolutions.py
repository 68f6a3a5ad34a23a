"""The memory that cuDNN takes for a convolution, in addition to its results.

    copies       its kernels read channels last: inputs, results and weights with channels first are copied,
                 and channels are padded to the width of a load (8 in half precision, 4 in float32 and, in the
                 forward, in float16), also those of weights.  An image of fewer than four channels is read
                 without a copy if the kernel has at most three positions a side, or the stride is 1.
                 Patches of 8 pixels or more are copied.  In float32 the result of few input channels (at most
                 64, or 256 for a kernel of one position) is written without a copy, up to 2^18 positions
    products     kernels of one position become plain products if rows are aligned to 16 bytes, and mostly
                 also otherwise, below 512 channels.  The gradient of the weight is then a product per sample
                 and their sum; in half precision only if its tiles alone do not fill the multiprocessors, in
                 float32 with many weights only if a sample has 200 positions
    images out   results of fewer than four channels are padded like inputs, but a transposed convolution in
                 float32 writes them without padding
    gradients    PyTorch first copies the gradient into the input's layout, once for all requested gradients
    weights      the gradient of a weight is cut into tiles of 128 x 128 for each position of the kernel;
                 if there are fewer tiles than multiprocessors, several multiprocessors share a tile and leave
                 partial sums; in float32 they also share tiles that would leave many multiprocessors idle
    biases       a sum of the gradient, in PyTorch's own kernels; see `formulas.partial_sums`
    transforms   in float32, for 64 samples or more, the gradient of 3 x 3 weights that fill about 1/4 of
                 their tiles is computed from Fourier transforms of input and gradient.  A plane of S x S is
                 transformed at P, the smallest power of two that is at least S + 2, into P/2 + 1 complex
                 columns, twice; the gradient is also copied.  Seen for S of 16, 20, 32 and 40, not 24, 48 and
                 56, and not where this takes more than a GiB
    dense        PyTorch copies an input whose layout is neither channels first nor channels last before it
                 calls cuDNN, and a sequence unless its channels come first
    depthwise    PyTorch's own kernels with channels first, without a workspace; cuDNN's with channels last

cuDNN chooses kernels at run time, so this describes choices that were observed.  They come from every
allocation of single convolutions and of ResNet, EfficientNet, ConvNeXt, Segformer and U-Net jobs on an H200
(cuDNN 9.19); padded weights, copied patches and images out come from the peaks of a CLIP, a mixer, a ViT and
an autoencoder.  Not modelled: at small batches patches in float32 may not be copied, depthwise convolutions
in float16 and some grouped ones have kernels of their own, and wide ones may leave partial sums in the
forward, too.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from flatout.ground.units import round_up
from flatout.memory.cuda.formulas import Formula

ALIGNED_BYTES = 16
WIDE, WIDE_GRADIENT = 512, 256  # channels, from which products that are not aligned are copied
WIDE_PATCH = 8
TILE = 128
IMAGE_TILE, LARGEST_SHARED = 256, 1280  # of an image: values of the weight's gradient for each other channel
FEW_CHANNELS = 4
NARROW, NARROW_PRODUCT = 64, 256  # channels in, up to which float32 results are written as they lie
MANY_POSITIONS = 1 << 18
# limits beyond which no product is taken for each sample: channels in, samples, weights; but for many
# weights too where a sample has many positions
THIN, FEW_SAMPLES, MANY_WEIGHTS, LONG_SAMPLE = 32, 32, 1 << 18, 200
POSITIONS_OF_A_SHARE = 7168  # at least, in half precision
BADLY_FILLED = 2 / 3  # of the multiprocessors
HEAD_BYTES = 16  # before every copy
DEPTHWISE_IMAGE = 28  # from this side on the input's gradient in float32 goes through transforms,
TRANSFORMED_KERNEL = 5  # for kernels from this side on: 7 x 7 does, 3 x 3 does not
TRANSFORMED, TRANSFORMED_PER_CHANNEL = 8, 25_880  # values per value of the input, and per channel
HALF_PER_WEIGHT = 32  # bytes per weight and sample
# the gradient of a weight of 3 x 3 in float32 that goes through transforms: sides of the image, channels on
# either side and samples at least, share of its tiles that the weight fills at most
TRANSFORMED_SIDES = (*range(16, 21), *range(32, 41))
FEW_TRANSFORMED, MANY_SAMPLES, FILLED = 16, 64, 0.3
MOST_TRANSFORMED_BYTES = 1 << 30  # seen with a quarter of it, not with 1.3 GiB

WorkspaceBlock = int | Formula
Group = tuple[WorkspaceBlock, ...]


def before_forward(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Return a copy of an input that cuDNN does not read as it lies, held until the call ends."""
    copy = _input_copy(args[0], args[1])
    return (copy,) if copy else ()


def _input_copy(x: Tensor, weight: Tensor) -> Group:
    return () if _dense_in(x, weight) is x else (x.nbytes,)


def _dense_in(x: Tensor, weight: Tensor) -> Tensor:
    """Return the input as PyTorch hands it to cuDNN: sequences in the usual order, images as they suggest."""
    order = torch.contiguous_format
    if x.dim() != 3 and torch.channels_last in map(suggest_memory_format, (x, weight)):
        order = torch.channels_last
    if x.dim() == 5 and torch.channels_last_3d in map(suggest_memory_format, (x, weight)):
        order = torch.channels_last_3d
    return x if x.is_contiguous(memory_format=order) else torch.empty_like(x, memory_format=order)


def forward(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Return the blocks that `aten.convolution` takes."""
    x, weight, _bias, stride, padding, dilation, transposed, _output_padding, groups = args
    x = _dense_in(x, weight)
    out = _output_elements(x, weight, stride, padding, dilation, transposed)
    if _is_channels_last(x):
        blocks = _turned_weight(x, weight, groups) + _padded_input(x, weight) + _padded_result(x, weight, out)
        return (blocks,) if blocks else ()
    if _is_depthwise(x, groups) or _is_read_directly(x, weight, stride):
        return ()
    if _is_product(weight, stride):
        return ((_copied_bytes(x, weight, out, multiple=1),),) if _copies_product(x, weight) else ()
    is_half = _is_half(x)
    multiple = {torch.bfloat16: 8, torch.float16: 4 if x.dim() < 5 else 1}.get(x.dtype, 1)
    if not transposed and tuple(stride) == tuple(weight.shape[2:]):  # patches: each input is read once
        if max(stride) < WIDE_PATCH:
            return ()
        multiple = multiple if is_half else _load(x)
    if _writes_image(weight, transposed):
        if not is_half:
            return ()
        out = out // weight.shape[1] * _load(x)
    elif not transposed:
        padded = _copied_bytes(x, weight, _padded_output(out, x, weight), multiple=multiple)
        if groups > 1:
            return ((padded,),)
        return (
            (_written(x, weight, x, channels=x.shape[1], positions=out // weight.shape[0], copied=padded),),
        )
    return ((_copied_bytes(x, weight, out, multiple=multiple),),)


def before_backward(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Return copies held until all gradients are done: the input's, and the gradient in the input's order."""
    gradient, x, weight, groups = args[0], args[1], args[2], args[9]
    copies = _input_copy(x, weight)
    x = _dense_in(x, weight)
    if not (_in_order_of(x, gradient) or (_is_depthwise(x, groups) and not _is_channels_last(x))):
        copies += (gradient.nbytes,)
    return (copies,) if copies else ()


def backward(args: Any, kwargs: Any, *, num_multiprocessors: int) -> tuple[Group, ...]:
    """Return the blocks of `aten.convolution_backward`, one group per gradient: input, weight, bias."""
    args = (args[0], _dense_in(args[1], args[2]), *args[2:])
    gradient, x, weight, groups = args[0], args[1], args[2], args[9]
    if _is_depthwise(x, groups):
        of_input, of_weight = _depthwise_backward(x, weight)
    else:
        of_input, of_weight = _input_gradient(args), _weight_gradient(args, num_multiprocessors)
    found = (of_input, of_weight, _bias_gradient(gradient, num_multiprocessors))
    return tuple(group for group, wanted in zip(found, args[10], strict=True) if wanted)


def _input_gradient(args: Any) -> Group:
    gradient, x, weight, _bias_sizes, stride = args[:5]
    transposed, groups = args[7], args[9]
    if _is_channels_last(x):
        return _turned_weight(x, weight, groups)
    if _is_product(weight, stride):
        copies = _copies_product(x, weight, in_backward=True)
        return (_copied_bytes(x, weight, gradient.numel(), multiple=_load(x)),) if copies else ()
    if not _is_half(x) and (x.shape[1] < FEW_CHANNELS or _writes_image(weight, transposed)):
        return ()
    num_output = _gradient_elements(gradient, x, weight, transposed)
    copied = _copied_bytes(x, weight, num_output, multiple=_load(x))
    if not transposed or groups > 1:
        return (copied,)
    # what a convolution does forward, from the gradient to the input
    positions = x.numel() // x.shape[1]
    return (_written(x, weight, gradient, channels=weight.shape[1], positions=positions, copied=copied),)


def _weight_gradient(args: Any, num_multiprocessors: int) -> Group:
    gradient, x, weight, _bias_sizes, stride = args[:5]
    transposed = args[7]
    summed = x if transposed else gradient
    positions = summed.numel() // summed.shape[1]
    parts = partial(_with_partial_sums, x, weight, transposed, positions, num_multiprocessors)
    if _is_channels_last(x):
        return (parts(beside=sum(_padded_input(x, weight))),)
    is_product = _is_product(weight, stride)
    if is_product and _is_point(x):
        return ()
    by_sample = x.shape[0] * weight.numel() * 4
    if is_product and _sums_samples(x, weight, num_multiprocessors):
        return (by_sample,)
    multiple = 1 if x.dim() == 5 and x.dtype is not torch.bfloat16 else _load(x)
    num_output = _gradient_elements(gradient, x, weight, transposed)
    at_once = parts(beside=_copied_bytes(x, weight, num_output, multiple=multiple))
    if not _is_half(x) and _is_image(x, weight, transposed) and _is_lean(x, weight, stride, transposed):
        at_once = 0
    if _is_transformed(args):
        transformed = _transformed_bytes(x, gradient, weight)
        most = MOST_TRANSFORMED_BYTES * x.shape[0] // transformed
        return (Formula("between", (x.shape[0], MANY_SAMPLES, most, transformed, _known(at_once))),)
    if is_product and not _is_half(x) and weight.numel() < MANY_WEIGHTS:
        # thin weights: by sample, unless samples are few
        return (Formula("either", (x.shape[0], FEW_SAMPLES + 1, _known(at_once), by_sample)),)
    return (at_once,) if at_once else ()


def _is_transformed(args: Any) -> bool:
    """Return whether many samples have the weight's gradient from Fourier transforms."""
    x, weight, stride, transposed, groups = args[1], args[2], args[4], args[7], args[9]
    if x.dtype is not torch.float32 or transposed or groups > 1:
        return False
    if (
        tuple(weight.shape[2:]) != (3, 3)
        or tuple(stride) != (1, 1)
        or min(weight.shape[:2]) < FEW_TRANSFORMED
    ):
        return False
    filled = weight.shape[0] * weight.shape[1] / (_num_tiles(weight) * TILE * TILE)
    return filled <= FILLED and all(side in TRANSFORMED_SIDES for side in x.shape[2:])


def _transformed_bytes(x: Tensor, gradient: Tensor, weight: Tensor) -> int:
    """Return the transforms of both, twice, and a copy of the gradient."""
    size = 1 << (max(x.shape[2:]) + weight.shape[2] - 2).bit_length()
    plane = 2 * 2 * size * (size // 2 + 1)
    num_planes = x.shape[0] * (x.shape[1] + gradient.shape[1])
    return int((num_planes * plane + gradient.numel()) * x.dtype.itemsize)


def _known(block: WorkspaceBlock) -> int:
    assert isinstance(block, int)  # a formula is of half precision alone
    return block


def _bias_gradient(gradient: Tensor, num_multiprocessors: int) -> Group:
    """Return the partial sums of a channels-last gradient."""
    channels = gradient.shape[1]
    if not _is_channels_last(gradient):
        return ()
    return (Formula("partial sums", (channels, gradient.numel() // channels, num_multiprocessors)),)


def _with_partial_sums(
    x: Tensor,
    weight: Tensor,
    transposed: bool,
    num_positions: int,
    num_multiprocessors: int,
    *,
    beside: int,
) -> WorkspaceBlock:
    """Return one block: the partial sums and the copies held with them."""
    taps = math.prod(weight.shape[2:])
    if _is_image(x, weight, transposed) and taps * _load(x) <= LARGEST_SHARED:
        padded = taps * _load(x)
        channels = weight.shape[1] if weight.shape[0] < FEW_CHANNELS else weight.shape[0]
        tiles = math.ceil(channels / TILE) * math.ceil(padded / IMAGE_TILE)
        return num_multiprocessors // tiles * channels * padded * 4 + beside
    across = _num_tiles(weight)
    # in half precision a single tile of 3 x 3 is shared by 13 of 132, not by 14
    spare = 1 if _is_half(x) and taps > 1 and across == 1 else 0
    shares = num_multiprocessors // (across * (taps + spare))
    if shares > 1 and _is_half(x) and across > 1:
        counts = (num_positions, POSITIONS_OF_A_SHARE, shares, weight.numel() * 4, beside)
        return Formula("shared tiles", counts)
    if shares > 1:
        return int(shares * weight.numel() * 4) + beside
    waves = -(-across * taps // num_multiprocessors)
    if _is_half(x) or across * taps > BADLY_FILLED * waves * num_multiprocessors:
        return beside
    return waves * (num_multiprocessors // 2) * TILE * TILE * 4 + beside


def _depthwise_backward(x: Tensor, weight: Tensor) -> tuple[Group, Group]:
    if not _is_channels_last(x):
        return (), ()
    if _is_half(x):
        return (), (x.shape[0] * weight.numel() * HALF_PER_WEIGHT,)
    is_large = min(x.shape[2:]) >= DEPTHWISE_IMAGE
    if is_large and min(weight.shape[2:]) >= TRANSFORMED_KERNEL:
        return (4 * (TRANSFORMED * x.numel() + TRANSFORMED_PER_CHANNEL * x.shape[1]),), ()
    return (), ()


def _turned_weight(x: Tensor, weight: Tensor, groups: int) -> Group:
    """Return a copy of the weight in the input's memory order, for the time of the call."""
    if not _is_channels_last(x) or _is_depthwise(x, groups) or math.prod(weight.shape[2:]) == 1:
        return ()
    if weight.is_contiguous(memory_format=torch.channels_last):
        return ()
    return (weight.nbytes,)


def _padded_input(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    """Pad a copy of a channels-last input whose channels are not a multiple of a load."""
    if x.dtype.itemsize > 2 or weight.shape[1] != x.shape[1] or x.shape[1] % 8 == 0:
        return ()
    multiple = 4 if x.dtype is torch.float16 and x.shape[1] < FEW_CHANNELS else 8
    return ((_padded(x, multiple) + weight.numel()) * x.dtype.itemsize + HEAD_BYTES,)


def _padded_result(x: Tensor, weight: Tensor, num_output: int) -> tuple[int, ...]:
    """Pad a channels-last result whose channels are not a multiple of a store."""
    channels = weight.shape[0]
    if not _is_half(x) or weight.shape[1] != x.shape[1] or channels % 8 == 0 or channels < 8:
        return ()
    rows = num_output // channels + weight.numel() // channels
    return (rows * round_up(channels, 8) * x.dtype.itemsize + HEAD_BYTES,)


def _is_depthwise(x: Tensor, groups: int) -> bool:
    return groups > 1 and groups == x.shape[1]


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _in_order_of(x: Tensor, gradient: Tensor) -> bool:
    if _is_channels_last(x):
        return gradient.is_contiguous(memory_format=torch.channels_last)
    return gradient.is_contiguous()


def _is_aligned(x: Tensor) -> bool:
    return math.prod(x.shape[2:]) * x.dtype.itemsize % ALIGNED_BYTES == 0


def _is_half(x: Tensor) -> bool:
    return x.dtype.itemsize <= 2


def _is_image(x: Tensor, weight: Tensor, transposed: bool) -> bool:
    """Return whether an image is read or written: few channels on one side of the weight."""
    reads = transposed or weight.shape[1] == x.shape[1]  # not a part of the channels, as in groups
    return weight.shape[0] < FEW_CHANNELS or (reads and weight.shape[1] < FEW_CHANNELS)


def _is_read_directly(x: Tensor, weight: Tensor, stride: Any) -> bool:
    if x.shape[1] >= FEW_CHANNELS:
        return False
    if x.dim() == 5:
        return x.dtype is not torch.float16
    return all(each == 1 for each in stride) or max(weight.shape[2:]) <= 3


def _is_lean(x: Tensor, weight: Tensor, stride: Any, transposed: bool) -> bool:
    """Return whether the weight gradient of a float32 image takes nothing: in 2D, or with one position."""
    in_plane = x.dim() == 4 or _is_product(weight, stride)
    return transposed or (in_plane and _is_read_directly(x, weight, stride))


def _written(
    x: Tensor, weight: Tensor, read: Tensor, *, channels: int, positions: int, copied: int
) -> WorkspaceBlock:
    """Copy input and weight, and the result too unless it has few channels and positions."""
    narrow = NARROW if math.prod(weight.shape[2:]) > 1 else NARROW_PRODUCT
    if _is_half(x) or not FEW_CHANNELS <= channels <= narrow:
        return copied
    directly = (read.numel() + weight.numel()) * x.dtype.itemsize + HEAD_BYTES
    return Formula("either", (positions, MANY_POSITIONS, directly, copied))


def _writes_image(weight: Tensor, transposed: bool) -> bool:
    return transposed and weight.shape[1] < FEW_CHANNELS


def _is_product(weight: Tensor, stride: Any) -> bool:
    return math.prod(weight.shape[2:]) == 1 and all(each == 1 for each in stride)


def _copies_product(x: Tensor, weight: Tensor, *, in_backward: bool = False) -> bool:
    """Return whether a kernel of one position needs copies: unaligned rows, and many channels."""
    if _is_aligned(x) or _is_point(x):
        return False
    if in_backward:
        return min(weight.shape[:2]) >= (WIDE if _is_half(x) else WIDE_GRADIENT)
    return min(weight.shape[:2]) >= WIDE or (_is_half(x) and _is_odd(x))


def _sums_samples(x: Tensor, weight: Tensor, num_multiprocessors: int) -> bool:
    """Return whether the weight gradient is one product per sample, and their sum, even for few samples."""
    if not _is_half(x):
        thin = weight.shape[1] <= THIN or weight.shape[0] % _load(x)
        is_long = math.prod(x.shape[2:]) >= LONG_SAMPLE
        return not thin and (is_long or weight.numel() < MANY_WEIGHTS)
    if _is_aligned(x):
        return _num_tiles(weight) < num_multiprocessors
    if _is_odd(x):
        return weight.shape[0] >= WIDE_GRADIENT and min(weight.shape[:2]) < WIDE
    return weight.numel() < MANY_WEIGHTS


def _num_tiles(weight: Tensor) -> int:
    """Return the tiles for one position of the kernel."""
    return math.ceil(weight.shape[0] / TILE) * math.ceil(weight.shape[1] / TILE)


def _is_point(x: Tensor) -> bool:
    """Return whether the image has one position, so that the kernel is one product."""
    return math.prod(x.shape[2:]) == 1


def _is_odd(x: Tensor) -> bool:
    return math.prod(x.shape[2:]) % 2 == 1


def _load(x: Tensor) -> int:
    """Return how many channels one load takes."""
    return ALIGNED_BYTES // x.dtype.itemsize


def _copied_bytes(x: Tensor, weight: Tensor, num_output: int, *, multiple: int) -> int:
    padded = _padded(weight, multiple) if weight.shape[1] == x.shape[1] else weight.numel()
    num_weights = padded if math.prod(weight.shape[2:]) > 1 else 0
    return int((_padded(x, multiple) + num_output + num_weights) * x.dtype.itemsize + HEAD_BYTES)


def _padded(x: Tensor, multiple: int) -> int:
    return x.numel() // x.shape[1] * round_up(x.shape[1], multiple)


def _gradient_elements(gradient: Tensor, x: Tensor, weight: Tensor, transposed: bool) -> int:
    if _writes_image(weight, transposed):
        return gradient.numel() // weight.shape[1] * _load(x)
    return gradient.numel() if transposed else _padded_output(gradient.numel(), x, weight)


def _padded_output(num_output: int, x: Tensor, weight: Tensor) -> int:
    """Pad an output of fewer than four channels to as many as a load takes."""
    channels = weight.shape[0]
    return num_output // channels * _load(x) if channels < FEW_CHANNELS else num_output


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
