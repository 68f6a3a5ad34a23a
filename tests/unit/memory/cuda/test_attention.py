"""The attention kernel each GPU takes, and what its backward holds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.memory.cuda.attention import (
    CUDNN_BACKWARD,
    EFFICIENT_BACKWARD,
    FLASH_BACKWARD,
    backward_workspace,
)
from flatout.memory.jobs.job import Recipe
from tests.support.memory import job_of, traced, under_rules

HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)


def query(dtype: torch.dtype, *, length: int, width: int = 64) -> Tensor:
    return torch.empty(4, 8, length, width, dtype=dtype, device="meta")


def attend(dtype: torch.dtype, mask: str | None = None, grouped: bool = False, width: int = 64) -> list[int]:
    x = torch.empty(2, 8, 128, width, dtype=dtype, requires_grad=True)
    num_heads = 1 if mask == "shared" else 2 if grouped else 8
    key = torch.empty(2, num_heads, 128, width, dtype=dtype, requires_grad=True)
    masks = {
        None: None,
        "shared": None,  # one head of keys for all queries, which nobody declared as a group
        "bool": torch.ones(2, 1, 128, 128, dtype=torch.bool),
        "trained": torch.empty(2, 8, 128, 128, dtype=dtype, requires_grad=mask == "trained"),
        "strided": torch.empty(2, 128, 128, 8, dtype=dtype).permute(0, 3, 1, 2),
    }
    result = F.scaled_dot_product_attention(x, key, key, attn_mask=masks[mask], enable_gqa=grouped)
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    return list(result.shape)


@pytest.mark.parametrize(
    ("capability", "dtype", "mask", "grouped", "kernel"),
    [
        (HOPPER, torch.bfloat16, None, False, "cudnn"),
        (HOPPER, torch.bfloat16, "bool", False, "cudnn"),
        (HOPPER, torch.bfloat16, None, True, "cudnn"),
        (HOPPER, torch.float32, None, False, "efficient"),
        (HOPPER, torch.float32, "bool", False, "efficient"),
        (HOPPER, torch.float32, None, True, "math"),
        (HOPPER, torch.bfloat16, "trained", False, "efficient"),
        (HOPPER, torch.bfloat16, "strided", False, "math"),
        (HOPPER, torch.bfloat16, "shared", False, "math"),
        (HOPPER, torch.float32, "strided", False, "math"),
        (AMPERE, torch.float16, None, False, "flash"),
        (AMPERE, torch.float16, "bool", False, "efficient"),
        (TURING, torch.float16, None, False, "efficient"),
    ],
)
def test_the_kernel_is_the_one_the_gpu_has(
    capability: tuple[int, int], dtype: torch.dtype, mask: str | None, grouped: bool, kernel: str
) -> None:
    made = under_rules(attend, dtype, mask, grouped, compute_capability=capability)
    assert made.result == [2, 8, 128, 64]
    fused = {name.split("_")[4] for name in made.attention if "dot_product" in name}
    assert fused == (set() if kernel == "math" else {kernel})
    scores = 2 * 8 * 128 * 128 * dtype.itemsize
    kept = [size for size in made.sizes_of("softmax") if size >= scores]
    assert bool(kept) is (kernel == "math")  # only then the matrix of scores is there


def test_a_plain_attention_adds_its_mask_in_place() -> None:
    def attended(model: nn.Module, x: Tensor) -> Tensor:
        mask = torch.empty(2, 128, 128, 8).permute(0, 3, 1, 2)
        return F.scaled_dot_product_attention(model(x), x, x, mask).sum()

    job = job_of(nn.Identity, lambda batch_size: torch.randn(2, 8, 128, 64), loss=attended)
    trace = traced(job, Recipe(mode="evaluate"))
    scores = [storage.op for storage in trace.storages if storage.num_bytes == 2 * 8 * 128 * 128 * 4]
    assert "aten.bmm.default" in scores
    assert "aten.add.Tensor" not in scores


def test_an_odd_width_is_padded_for_flash_and_cut_again() -> None:
    made = under_rules(attend, torch.float16, None, False, 60, compute_capability=AMPERE)
    assert made.result == [2, 8, 128, 60]
    assert 2 * 8 * 128 * 64 * 2 in made.sizes_of("pad")


def test_cudnn_holds_a_float_for_each_element_and_row() -> None:
    x = query(torch.bfloat16, length=512)
    ((measured,),) = backward_workspace(CUDNN_BACKWARD, (x, x, x))
    assert measured == 4_194_304 + 65_536
    grouped = torch.empty(4, 2, 512, 64, dtype=torch.bfloat16, device="meta")
    ((more,),) = backward_workspace(CUDNN_BACKWARD, (x, x, grouped))
    assert more - measured == 2 * x.numel() * 2  # gradients of key and value for every head


def test_efficient_holds_blocks_of_accumulators() -> None:
    x = query(torch.float32, length=197)
    first, second = backward_workspace(EFFICIENT_BACKWARD, (x, x, x))
    rows = 4 * 8 * 197
    assert first == (rows * 64 * 4, rows * 4, rows * 4)
    assert second == (rows * 4, 2_099_200)


def test_efficient_takes_tiles_of_64_rows_for_narrow_heads() -> None:
    """Windows of 49 positions, as in Swin: one tile each, and its lock of four words."""
    x = torch.empty(6, 3, 49, 32, dtype=torch.float16, device="meta")
    ((_rows, blocks),) = backward_workspace(EFFICIENT_BACKWARD, (x, x, x))
    assert blocks == 6 * 3 * (64 * 64 + 4) * 4


def test_efficient_multiplies_gradient_and_result_by_itself_in_half_precision() -> None:
    """As recorded of a Swin in float16: 100,761,600 bytes of accumulators beside a float for each row."""
    x = torch.empty(512, 12, 49, 32, dtype=torch.float16, device="meta")
    rows = 512 * 12 * 49
    assert backward_workspace(EFFICIENT_BACKWARD, (x, x, x)) == ((rows * 4, 100_761_600),)


def test_flash_rounds_rows_and_width_up() -> None:
    x = query(torch.float16, length=130, width=40)
    rows = 4 * 8 * 256
    assert backward_workspace(FLASH_BACKWARD, (x, x, x)) == ((rows * 64 * 4, rows * 4),)
