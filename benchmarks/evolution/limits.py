"""How fast plain inference could be, and what the bytes of a population's factors leave of it.

Plain inference takes the prompt's products, then cache bytes and products of every step.

Two answers.  With *peak* products run as fast as the fastest large product of the GPU; with *alone* they take
what cuBLAS takes for exactly these products, one after another with nothing between, each with weights of its
own, so that none finds its weights in the cache.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from arms import Load
from shapes import Shape

from flatout.multiplex.models.decoder import Decoder

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # measured on an H200: a copy, a large bf16 product
REPEATS = 7


def peak_s(decoder: Decoder, load: Load) -> float:
    weights = _weights(decoder)
    products = max(2 * weights * load.rows / FLOPS_PER_S, 2 * weights / BYTES_PER_S)
    return _prompt_s(decoder, load) + _cache_s(decoder, load) + load.new * products


def alone_s(decoder: Decoder, load: Load) -> float:
    return _prompt_s(decoder, load) + _cache_s(decoder, load) + load.new * products_s(decoder, load.rows)


def products_s(decoder: Decoder, rows: int) -> float:
    """Seconds of all products of one step, recorded as one graph and replayed."""
    products = [one.weight for one in decoder.projections().values()] + [decoder.head.weight]
    made: dict[str, Any] = {"device": decoder.device, "dtype": decoder.dtype}
    inputs = {width: torch.randn(rows, width, **made) for width in {w.shape[1] for w in products}}
    outputs = {height: torch.empty(rows, height, **made) for height in {w.shape[0] for w in products}}

    def run() -> None:
        for weight in products:
            torch.mm(inputs[weight.shape[1]], weight.T, out=outputs[weight.shape[0]])

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    taken = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def left_by_factors(shape: Shape, *, rank: int, members: int, steps: int, plain_s: float) -> float:
    """Return the share of plain inference that reading every pair's factors, in int8, once a step leaves."""
    return plain_s / (plain_s + steps * factor_bytes(shape, rank=rank, members=members) / BYTES_PER_S)


def factor_bytes(shape: Shape, *, rank: int, members: int) -> int:
    """Count the bytes of all factors, one per number: the inputs and outputs of a layer's four products."""
    heads, kv_heads = shape.heads * shape.head_width, 2 * shape.kv_heads * shape.head_width
    attention = (shape.width + heads + kv_heads) + (heads + shape.width)
    mlp = (shape.width + 2 * shape.inner) + (shape.inner + shape.width)
    return shape.layers * (attention + mlp) * rank * members // 2


def _weights(decoder: Decoder) -> int:
    inner = sum(product.weight.numel() for product in decoder.projections().values())
    return inner + decoder.head.weight.numel()


def _prompt_s(decoder: Decoder, load: Load) -> float:
    inner = _weights(decoder) - decoder.head.weight.numel()
    return 2 * inner * load.rows * (load.prompt - 1) / FLOPS_PER_S


def _cache_s(decoder: Decoder, load: Load) -> float:
    attention = decoder.blocks[0].attention
    per_position = 2 * attention.num_kv_heads * attention.head_width * 2 * len(decoder.blocks)
    positions = sum(load.prompt + step for step in range(load.new))
    return load.rows * per_position * positions / BYTES_PER_S
