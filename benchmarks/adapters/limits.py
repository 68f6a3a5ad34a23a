"""What a fused step must compute and move at least, and what the device reaches on that alone."""

from __future__ import annotations

import time
from typing import Any

import torch
from models import RANKS

from flatout.hardware.matching import all_datasheets


def step_flops(model: Any, *, tokens: int, length: int) -> float:
    """Products of one step of all adapters: the base forwards and back to x, attention, and the factors."""
    config = model.config
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    base = 2 * (4 * width * width + 2 * width * inner)  # of a token in a layer
    attention = 4 * length * width
    thin = sum(2 * rank * (4 * 2 * width + 2 * (width + inner)) for rank in RANKS)  # forwards, all adapters
    first = 2 * 3 * width * width  # nothing goes back to the embeddings
    everyone = len(RANKS) * tokens
    return layers * (everyone * (2 * base + 3.5 * attention) + 3 * tokens * thin) - everyone * first


def step_bytes(model: Any, *, tokens: int, element_bytes: int) -> float:
    """What must be moved if every product reads its operands once and writes its result once.

    Weights twice; of each linear map x and y forwards, dy, dx and x again backwards; and the optimizer's
    state: parameter, gradient and two moments in float32, read and written, and the copy in half precision.
    """
    config = model.config
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    weights = layers * (4 * width * width + 2 * width * inner) * element_bytes
    sides = 4 * 2 * width + 2 * (width + inner)  # x and y of the six maps
    inputs = 4 * width + width + inner
    activations = layers * len(RANKS) * tokens * (2 * sides + inputs) * element_bytes
    factors = layers * sum(RANKS) * sides
    return 2 * weights + activations + factors * (7 * 4 + 4 + 2 * element_bytes)


def reachable(device: str, dtype: torch.dtype) -> dict[str, float | None]:
    """What this device reaches on one large product and one large copy, and what its datasheet says."""
    size = 8192 if device != "cpu" else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    flops = 2 * size**3 / best_s(lambda: a @ b, device)
    big = torch.empty((1 << 30) if device != "cpu" else (1 << 24), dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    moved = 2 * big.numel() / best_s(lambda: other.copy_(big), device)
    sheet = None
    if device != "cpu":
        name = torch.cuda.get_device_name()
        sheet = next((one for one in all_datasheets() if name in one.driver_names), None)
    return {
        "product_flops_per_s": flops,
        "copy_bytes_per_s": moved,
        "datasheet_flops_per_s": None if sheet is None else sheet.peak_flops.get("bf16"),
    }


def best_s(call: Any, device: str, *, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    found = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        found.append(time.perf_counter() - start)
    return min(found)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
