"""What a GPU takes whatever the model: the context, and the workspaces libraries keep once they are used."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

MIB = 2**20


def active_blocks() -> list[int]:
    return sorted(
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )


def _linear(dtype: torch.dtype | None, *, bias: bool, backward: bool = True) -> None:
    layer = nn.Linear(256, 256, bias=bias, device="cuda")
    with torch.autocast("cuda", dtype=dtype) if dtype is not None else nullcontext():
        result = layer(torch.randn(64, 256, device="cuda"))
    if backward:
        result.float().sum().backward()


def _batched() -> None:
    left = torch.randn(8, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.bmm(left, left.transpose(1, 2)).float().sum().backward()


def _convolution(dtype: torch.dtype | None) -> None:
    layer = nn.Conv2d(16, 32, 3, padding=1, device="cuda")
    with torch.autocast("cuda", dtype=dtype) if dtype is not None else nullcontext():
        layer(torch.randn(4, 16, 32, 32, device="cuda")).float().sum().backward()


def _recurrent() -> None:
    stack = nn.LSTM(64, 64, num_layers=2, dropout=0.1, device="cuda")
    stack(torch.randn(16, 4, 64, device="cuda"))[0].sum().backward()


def _attention(dtype: torch.dtype) -> None:
    query = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(query, query, query).float().sum().backward()


PIECES: dict[str, Callable[[], None]] = {
    "fp32 linear without bias, forward": lambda: _linear(None, bias=False, backward=False),
    "fp32 linear without bias": lambda: _linear(None, bias=False),
    "fp32 linear with bias": lambda: _linear(None, bias=True),
    "bf16 linear without bias": lambda: _linear(torch.bfloat16, bias=False),
    "bf16 linear with bias": lambda: _linear(torch.bfloat16, bias=True),
    "fp16 linear with bias": lambda: _linear(torch.float16, bias=True),
    "bf16 batched product": _batched,
    "fp32 convolution": lambda: _convolution(None),
    "bf16 convolution": lambda: _convolution(torch.bfloat16),
    "lstm": _recurrent,
    "fp32 attention": lambda: _attention(torch.float32),
    "bf16 attention": lambda: _attention(torch.bfloat16),
}


def measure_constants(base_bytes: int | None) -> dict[str, Any]:
    """Blocks that each piece leaves behind, in this order in one process, and the context's growth."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    properties = torch.cuda.get_device_properties(0)
    pieces = []
    for name, run in PIECES.items():
        before = active_blocks()
        run()
        torch.cuda.synchronize()
        gc.collect()
        left = active_blocks()
        for size in before:
            left.remove(size)
        pieces.append({"piece": name, "left_bytes": left, "context_bytes": _context(base_bytes)})
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(0)),
        "total_bytes": properties.total_memory,
        "num_multiprocessors": properties.multi_processor_count,
        "pieces": pieces,
        "cudnn": torch.backends.cudnn.version(),
    }


def _context(base_bytes: int | None) -> int | None:
    if base_bytes is None:
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() - base_bytes
