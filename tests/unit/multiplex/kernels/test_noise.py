from __future__ import annotations

import pytest
import torch

from flatout.multiplex import noise
from flatout.multiplex.philox import stream_key
from tests.kernels import DEVICE, needs_device

pytestmark = needs_device

SEED, EPOCH = 2**63 + 5, 2**31 + 3


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("first", "count"), [(0, 16), (5, 1007), (13, 2), (4096, 2500), (1 << 34, 40)])
def test_the_kernel_draws_the_numbers_of_the_cpu(dtype: torch.dtype, first: int, count: int) -> None:
    from flatout.multiplex.kernels.noise import fill_with_triton

    pairs = torch.tensor([3, 9, 2**32 - 1, 0])
    whole = torch.full((4, count + 3), 77, dtype=dtype, device=DEVICE)
    fill_with_triton(
        whole[:, :count],
        values=noise.table(dtype, DEVICE),
        key=stream_key(SEED, "w", "full"),
        epoch=EPOCH,
        pairs=pairs.to(DEVICE),
        first=first,
    )
    drawn = noise.normals(
        seed=SEED, epoch=EPOCH, parameter="w", side="full", pairs=pairs, count=count, first=first, dtype=dtype
    )
    assert torch.equal(whole[:, :count].cpu(), drawn)
    assert whole[:, count:].eq(77).all()


def test_a_word_keeps_its_bits_as_a_signed_number() -> None:
    from flatout.multiplex.kernels.noise import as_signed

    for word in (0, 1, 2**31 - 1, 2**31, 2**32 - 1):
        assert as_signed(word) % 2**32 == word
        assert -(2**31) <= as_signed(word) < 2**31
