"""What cuDNN takes for a convolution beside its results.

    copies       its kernels want channels last: inputs, results and weights in the usual order are copied,
                 and channels are padded to what a load takes (8 in half precision, 4 in float32 and, forward,
                 in float16), those of weights too.  Kernels of one position are plain products where they can
                 be, and an image of fewer than four channels is read as it lies at stride 1.  Patches are
                 copied from 8 pixels on
    images out   fewer than four channels are padded like those of an input; but a transposed convolution
                 writes them as they lie in float32
    gradients    PyTorch brings the gradient into the order of the input first
    weights      the gradient of a weight is cut into tiles of 128 x 128 for each position of the kernel;
                 where these are fewer than the multiprocessors, several share one and leave partial sums
    depthwise    in the usual order PyTorch's own kernels, which take nothing; channels last cuDNN's, which
                 sum the weight's gradient in float32 copies of input and gradient

cuDNN chooses kernels on the GPU, so this is a description of its choices and not a law: it was drawn from
allocations of single convolutions and of ResNet, ConvNeXt and U-Net jobs on an H200 (cuDNN 9.19), all of
which were looked at; padded weights, copied patches and images out from the peaks of a CLIP, a mixer, a ViT
and an autoencoder.  At small batches patches in float32 may not be copied, which is not followed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ALIGNED_BYTES = 16
WIDE = 512  # channels
WIDE_PATCH = 8
TILE = 128
FEW_CHANNELS = 4
HEAD_BYTES = 16  # before every copy
DEPTHWISE_IMAGE = 28  # from this side on the input's gradient in float32 goes through transforms
TRANSFORMED, TRANSFORMED_PER_CHANNEL = 8, 25_880  # values per value of the input, and per channel
HALF_PER_WEIGHT = 32  # bytes per weight and sample

Group = tuple[int, ...]


def forward(args: Any, kwargs: Any) -> tuple[Group, ...]:
    """Of `aten.convolution`."""
    x, weight, _bias, stride, padding, dilation, transposed, _output_padding, groups = args
    if _is_channels_last(x):
        return _groups(_turned_weight(x, weight, groups) + _padded_input(x, weight))
    if _is_depthwise(x, groups) or not _copies(x, weight, stride) or _is_read_directly(x, stride):
        return ()
    out = _output_elements(x, weight, stride, padding, dilation, transposed)
    is_half = x.dtype.itemsize <= 2
    multiple = {torch.bfloat16: 8, torch.float16: 4}.get(x.dtype, 1)
    if not transposed and tuple(stride) == tuple(weight.shape[2:]):  # patches: each input is read once
        if max(stride) < WIDE_PATCH:
            return ()
        multiple = multiple if is_half else _load(x)
    if _writes_image(weight, transposed):
        if not is_half:
            return ()
        out = out // weight.shape[1] * _load(x)
    elif not transposed:
        out = _padded_output(out, x, weight)
    return ((_copied_bytes(x, weight, out, multiple=multiple),),)


def backward(args: Any, kwargs: Any, *, num_multiprocessors: int) -> tuple[Group, ...]:
    """Of `aten.convolution_backward`: a group for the gradient of the input, one for that of the weight."""
    gradient, x, weight, _bias_sizes, stride = args[:5]
    groups, mask = args[9], args[10]
    if _is_depthwise(x, groups):
        return _depthwise_backward(gradient, x, weight, mask) if _is_channels_last(x) else ()
    turned = () if _in_order_of(x, gradient) else (_num_bytes(gradient),)
    copies = _copies(x, weight, stride)
    num_output = gradient.numel()
    if _writes_image(weight, args[7]):
        copies = copies and x.dtype.itemsize <= 2
        num_output = num_output // weight.shape[1] * _load(x)
    elif not args[7]:
        num_output = _padded_output(num_output, x, weight)
    result: list[Group] = []
    if mask[0]:
        group = turned + _turned_weight(x, weight, groups)
        result.append(group + ((_copied_bytes(x, weight, num_output, multiple=_load(x)),) if copies else ()))
    if mask[1]:
        parts = _partial_sums(x, weight, num_multiprocessors)
        direct = x.dtype.itemsize > 2 and (_is_read_directly(x, stride) or _writes_image(weight, args[7]))
        copied = 0 if direct else _copied_bytes(x, weight, num_output, multiple=_load(x))
        result.append((*turned, _weight_gradient(x, weight, copies=copies, parts=parts, copied=copied)))
    return tuple(result)


def _weight_gradient(x: Tensor, weight: Tensor, *, copies: bool, parts: int, copied: int) -> int:
    if _is_channels_last(x):
        return parts + sum(_padded_input(x, weight))
    if math.prod(weight.shape[2:]) == 1 and _is_aligned(x) and not copies:
        return int(x.shape[0] * weight.numel() * 4)  # one product for each sample, then their sum
    return parts + copied


def _partial_sums(x: Tensor, weight: Tensor, num_multiprocessors: int) -> int:
    across = math.ceil(weight.shape[0] / TILE) * math.ceil(weight.shape[1] / TILE)
    taps = math.prod(weight.shape[2:])
    # a single tile of 3 x 3 is shared by 13 of 132, not by 14
    shares = num_multiprocessors // (across * (taps + 1 if taps > 1 and across == 1 else taps))
    if shares > 1:
        return int(shares * weight.numel() * 4)
    return num_multiprocessors * TILE * TILE * 4 if x.dtype.itemsize > 2 else 0


def _depthwise_backward(gradient: Tensor, x: Tensor, weight: Tensor, mask: Any) -> tuple[Group, ...]:
    result: list[Group] = []
    if mask[0] and x.dtype.itemsize == 2:
        result.append((x.shape[0] * weight.numel() * HALF_PER_WEIGHT,))
    elif mask[0] and min(x.shape[2:]) >= DEPTHWISE_IMAGE:
        result.append((4 * (TRANSFORMED * x.numel() + TRANSFORMED_PER_CHANNEL * x.shape[1]),))
    elif mask[0]:
        result.append(())
    if mask[1]:
        result.append((4 * (x.numel() + gradient.numel()),))
    return tuple(result)


def _turned_weight(x: Tensor, weight: Tensor, groups: int) -> tuple[int, ...]:
    """PyTorch brings the weight into the order of the input for the time of the call."""
    if not _is_channels_last(x) or _is_depthwise(x, groups) or math.prod(weight.shape[2:]) == 1:
        return ()
    if weight.is_contiguous(memory_format=torch.channels_last):
        return ()
    return (_num_bytes(weight),)


def _padded_input(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    """Channels last, but not a multiple of what a load takes: copied with more channels."""
    if x.dtype.itemsize > 2 or weight.shape[1] != x.shape[1] or x.shape[1] % 8 == 0:
        return ()
    multiple = 4 if x.dtype is torch.float16 and x.shape[1] < FEW_CHANNELS else 8
    return ((_padded(x, multiple) + weight.numel()) * x.dtype.itemsize + HEAD_BYTES,)


def _groups(blocks: tuple[int, ...]) -> tuple[Group, ...]:
    return (blocks,) if blocks else ()


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


def _is_read_directly(x: Tensor, stride: Any) -> bool:
    return x.shape[1] < FEW_CHANNELS and all(each == 1 for each in stride)


def _writes_image(weight: Tensor, transposed: bool) -> bool:
    return transposed and weight.shape[1] < FEW_CHANNELS


def _copies(x: Tensor, weight: Tensor, stride: Any) -> bool:
    """Whether cuDNN copies to channels last; kernels of one position are plain products where they can be."""
    if _is_channels_last(x):
        return False
    if math.prod(weight.shape[2:]) == 1 and all(each == 1 for each in stride):
        odd = math.prod(x.shape[2:]) % 2 == 1
        return not _is_aligned(x) and (odd or min(weight.shape[:2]) >= WIDE)
    return True


def _load(x: Tensor) -> int:
    """How many channels a load takes."""
    return ALIGNED_BYTES // x.dtype.itemsize


def _copied_bytes(x: Tensor, weight: Tensor, num_output: int, *, multiple: int) -> int:
    padded = _padded(weight, multiple) if weight.shape[1] == x.shape[1] else weight.numel()
    num_weights = padded if math.prod(weight.shape[2:]) > 1 else 0
    return int((_padded(x, multiple) + num_output + num_weights) * x.dtype.itemsize + HEAD_BYTES)


def _padded(x: Tensor, multiple: int) -> int:
    return x.numel() // x.shape[1] * (-(-x.shape[1] // multiple) * multiple)


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.dtype.itemsize


def _padded_output(num_output: int, x: Tensor, weight: Tensor) -> int:
    """An image of fewer than four channels out is written with as many as a load takes."""
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
