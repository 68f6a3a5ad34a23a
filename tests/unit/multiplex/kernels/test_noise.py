from __future__ import annotations

import pytest
import torch

from flatout.multiplex.noise import draws
from flatout.multiplex.noise.philox import stream_key
from tests.support.kernels import DEVICE, needs_device

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
        values=draws.table(dtype, DEVICE),
        key=stream_key(SEED, "w", "full"),
        epoch=EPOCH,
        pairs=pairs.to(DEVICE),
        first=first,
    )
    drawn = draws.normals(
        seed=SEED, epoch=EPOCH, parameter="w", side="full", pairs=pairs, count=count, first=first, dtype=dtype
    )
    assert torch.equal(whole[:, :count].cpu(), drawn)
    assert whole[:, count:].eq(77).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_one_launch_draws_many_tensors(dtype: torch.dtype) -> None:
    from flatout.multiplex.kernels.noise import fill_all, part_table

    widths = {"a": 8, "b": 2500, "c": 4097}
    outs = [torch.full((5, width), 77, dtype=dtype, device=DEVICE) for width in widths.values()]
    keys = [stream_key(SEED, name, "shrink") for name in widths]
    pairs = range(2**31 - 1, 2**31 + 2)
    fill_all(
        part_table(outs, keys), values=draws.table(dtype, DEVICE), epoch=EPOCH, pairs=pairs, largest=4097
    )
    for (name, width), out in zip(widths.items(), outs, strict=True):
        drawn = draws.normals(
            seed=SEED, epoch=EPOCH, parameter=name, side="shrink", pairs=pairs, count=width, dtype=dtype
        )
        assert torch.equal(out[:3].cpu(), drawn)
        assert out[3:].eq(77).all()


def test_a_word_keeps_its_bits_as_a_signed_number() -> None:
    from flatout.multiplex.kernels.noise import as_signed

    for word in (0, 1, 2**31 - 1, 2**31, 2**32 - 1):
        assert as_signed(word) % 2**32 == word
        assert -(2**31) <= as_signed(word) < 2**31
