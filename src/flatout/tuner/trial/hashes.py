"""A tensor as one number: equal bits give equal numbers, computed on the tensor's device.

The bits of every element, as an integer, are multiplied by an odd number that belongs to its position, and
the products are added modulo 2^64.  The sum does not depend on the order of addition, and a change of a
single element always changes it.
"""

from __future__ import annotations

import hashlib
from typing import Any

from flatout.measure.batches import arrays_of

CHUNK = 1 << 22
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number


def hash_of(tensor: Any) -> str:
    """Hash the bits, shape and format of a tensor, independent of its device and layout."""
    import torch

    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # this rank's share
        tensor = tensor.to_local()
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce()
        return f"{hash_of(tensor.indices())} {hash_of(tensor.values())}"
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.contiguous().view(-1).view(whole)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        chunk = bits[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=tensor.device)
        total += ((chunk + 1) * (places * MULTIPLIER * 2 + 1)).sum()
    return f"{int(total) & (1 << 64) - 1:016x} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def hash_of_batch(batch: Any) -> str:
    """Hash all tensors and arrays of a batch, in order."""
    return ", ".join(_hash_of_array(array) for array in arrays_of(batch))


def _hash_of_array(array: Any) -> str:
    if hasattr(array, "detach"):
        return hash_of(array)
    digest = hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()
    return f"{digest} {array.dtype}{list(array.shape)}"
