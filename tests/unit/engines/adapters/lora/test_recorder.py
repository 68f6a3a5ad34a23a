"""Where nothing can be recorded a step runs as it is; tests/gpu/test_adapters_on_gpu.py runs recordings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.optimizer import AdapterOptimizer, StepSettings
from flatout.engines.adapters.lora.recorder import Recorder
from tests.support.adapters_packed import batches, bert, blocks, specs


class OnGpu:
    """What a recorder asks of an encoder, from a machine with a GPU."""

    device = torch.device("cuda", 0)


def optimizer_of(bank: AdapterBank, *, loss_scaling: bool = False) -> AdapterOptimizer:
    settings = {name: StepSettings() for name in bank.names}
    return AdapterOptimizer(bank, settings=settings, heads={}, loss_scaling=loss_scaling)


def test_an_eager_step_is_called_with_its_batches() -> None:
    model = bert(num_layers=1)
    bank = AdapterBank(model, specs())
    seen: list[Sequence[Any]] = []

    def step(given: Sequence[Any]) -> Tensor:
        seen.append(given)
        return torch.ones(len(given))

    with PackedEncoder(model, bank) as encoder:
        recorder = Recorder(encoder, optimizer=optimizer_of(bank))
        given = batches(blocks())
        assert all(recorder(step, given, key=True).tolist() == [1.0] * 3 for _ in range(3))
    assert seen == [given] * 3 and not recorder.graphs
    assert str(recorder.decision) == "eager (computed: CUDA graphs need a GPU)"


@pytest.mark.parametrize(
    ("graph", "loss_scaling", "exchanges", "said"),
    [
        ("auto", False, False, "graph (assumed: shapes that occur again are recorded"),
        ("off", False, False, "eager (computed: graphs are turned off)"),
        ("on", True, False, "eager (computed: loss scaling reads a flag"),
        ("on", False, True, "eager (computed: the processes exchange gradients"),
    ],
)
def test_the_decision_says_why(graph: Any, loss_scaling: bool, exchanges: bool, said: str) -> None:
    bank = AdapterBank(bert(num_layers=1), specs())
    encoder: Any = OnGpu()
    optimizer = optimizer_of(bank, loss_scaling=loss_scaling)
    recorder = Recorder(encoder, optimizer=optimizer, graph=graph, exchanges=exchanges)
    assert str(recorder.decision).startswith(said)
