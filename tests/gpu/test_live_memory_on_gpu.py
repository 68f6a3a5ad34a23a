"""Leaks on a GPU, whose backward pass runs on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flatout.measure.evidence import Memory
from flatout.measure.lines.live_memory import MemoryRecorder
from flatout.measure.user_code import UserCode

pytestmark = pytest.mark.gpu

HERE = Path(__file__)
WARM, WATCHED = 3, 4


def watched(after_step: Callable[[torch.Tensor, torch.Tensor], object]) -> Memory:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = MemoryRecorder(UserCode(str(HERE.parent)), "cuda")
    for number in range(WARM + WATCHED):
        if number == WARM:
            recorder.start()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(torch.randn(8, 16, device="cuda"))
        loss = logits.float().square().mean()
        loss.backward()
        optimizer.step()
        after_step(loss, logits)
        if number >= WARM:
            recorder.step_end()
    return recorder.stop()


def line_of(part: str) -> int:
    lines = HERE.read_text().splitlines()
    (number,) = [n for n, text in enumerate(lines, start=1) if text.strip().startswith(part)]
    return number


def test_kept_losses_keep_their_graphs() -> None:
    kept_losses: list[torch.Tensor] = []

    def keep(loss: torch.Tensor, logits: torch.Tensor) -> None:
        kept_losses.append(loss)

    memory = watched(keep)
    (graph,) = memory.graphs
    assert graph.holder == "kept_losses" and graph.nodes_per_step >= 5
    assert graph.holder_place is not None and graph.holder_place.line == line_of("kept_losses.append(loss)")
    growth = next(growth for growth in memory.growth if growth.holder == "kept_losses")
    assert growth.with_graph and growth.tensors_per_step == 1
    assert growth.place is not None and growth.place.line == line_of("loss = logits.float()")


def test_kept_outputs_without_a_graph() -> None:
    kept_outputs: list[torch.Tensor] = []

    def keep(loss: torch.Tensor, logits: torch.Tensor) -> None:
        kept_outputs.append(logits.detach())

    memory = watched(keep)
    (growth,) = memory.growth
    assert (growth.holder, growth.with_graph, memory.graphs) == ("kept_outputs", False, ())
    assert growth.bytes_per_step == 8 * 4 * 2


def test_a_clean_loop_gives_nothing() -> None:
    total = 0.0

    def add(loss: torch.Tensor, logits: torch.Tensor) -> None:
        nonlocal total
        total += loss.item()

    memory = watched(add)
    assert (memory.growth, memory.graphs, memory.growth_bytes_per_step) == ((), (), 0.0)
    assert total > 0


def test_the_peak_is_the_allocators_and_its_statistics_stay() -> None:
    torch.cuda.reset_peak_memory_stats()
    large = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del large
    peak_before = torch.cuda.max_memory_allocated()
    memory = watched(lambda loss, logits: None)
    assert memory.peak_bytes == torch.cuda.max_memory_allocated() >= peak_before >= 1 << 28


def test_arithmetic_is_counted_in_the_dtype_autocast_chose() -> None:
    flops = watched(lambda loss, logits: None).flops_by_dtype
    first, second = 2 * 8 * 16 * 32, 2 * 8 * 32 * 4
    assert flops == {"bf16": first + second + first + 2 * second}  # the input wants no gradient
