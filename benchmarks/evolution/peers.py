"""Other ways to run the same shape on a GPU: Hugging Face's generate, and batched products per member."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from arms import Load
from bmm import BatchedProducts
from shapes import Shape, transformers_model

from flatout.multiplex.models.decoder import Decoder


def hugging_face(shape: Shape, *, rows: int, prompt: int, new: int) -> float:
    """Tokens per second of transformers' generate with a model of `shape`."""
    model = transformers_model(shape, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(2, shape.vocabulary, (rows, prompt), device="cuda")
    options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return rows * new / statistics.median(taken[1:])


def batched_products(decoder: Decoder, load: Load) -> list[dict[str, Any]]:
    """Decode steps in CUDA graphs, members = rows, in the middle of the text."""
    found = []
    at = load.prompt + load.new // 2
    for rank in (1, 4):
        arm = BatchedProducts(
            decoder, rows=load.rows, positions=load.prompt + load.new, per_member=1, rank=rank
        )
        arm.state.position.fill_(at)
        plain = _captured(lambda arm=arm: arm.step.best(arm.step.decode(arm.state.token, arm.state.position)))
        batched = _captured(arm)
        pairs = [(_ms(plain), _ms(batched)) for _ in range(20)][3:]
        found.append({"rank": rank, "of_plain": statistics.median(a / b for a, b in pairs)})
        del arm, plain, batched
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
