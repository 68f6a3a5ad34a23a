"""What a recorded step reads, when two batches may share a recording, and when nothing is recorded.

The recording itself runs in tests/gpu/test_adapters_on_gpu.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.engines.adapters.lora import recorder as module
from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.optimizer import AdapterOptimizer, StepSettings
from flatout.engines.adapters.lora.recorder import Recorder, signature, tensors_of, with_tensors
from flatout.engines.adapters.lora.token_blocks import TokenBlock
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


@dataclass(frozen=True, kw_only=True)
class Given:
    """A batch with everything that a task may put into one."""

    block: TokenBlock
    targets: dict[str, Any]
    count: Tensor
    note: str = "kept"


def given(*, seed: int = 0, types: bool = True, length: int = 6) -> Given:
    (block,) = blocks(((2, length),), seed=seed, types=types)
    return Given(
        block=block,
        targets={"start": torch.full((2,), seed), "unit": "tokens"},
        count=torch.tensor(2.0 + seed),
    )


def test_all_tensors_are_found_and_can_be_replaced() -> None:
    first, second = given(seed=0), given(seed=1)
    found = tensors_of(first)
    assert list(found) == ["block.ids", "block.lengths", "block.types", "targets.start", "count"]
    changed = with_tensors(first, tensors_of(second))
    assert changed.block.ids is second.block.ids and changed.block.types is second.block.types
    assert changed.targets["start"] is second.targets["start"] and changed.targets["unit"] == "tokens"
    assert changed.count is second.count and changed.note == "kept"
    assert "block.types" not in tensors_of(given(types=False))


def test_only_batches_of_the_same_shapes_share_a_recording() -> None:
    assert signature([given(seed=0)]) == signature([given(seed=1)])
    others = [given(types=False), given(length=7)]
    assert len({signature([one]) for one in (given(), *others)}) == 3
    assert signature([given(), given()]) != signature([given()])
    assert hash(signature([given()]))


def test_a_recording_that_breaks_off_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread does at the wrong moment must not cost a run its graphs."""
    model = bert(num_layers=1)
    bank = AdapterBank(model, specs())

    def break_off(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(module, "capture", break_off)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    with PackedEncoder(model, bank) as encoder:
        on_gpu: Any = OnGpu()
        on_gpu.prepare = encoder.prepare
        recorder = Recorder(on_gpu, optimizer=optimizer_of(bank), graph="on")
        decisions = []
        for _ in range(4):
            recorder(lambda given: torch.ones(len(given)), batches(blocks()), key=None)
            decisions.append(recorder.decision.value)
    assert decisions == ["graph", "graph", "eager", "eager"]
    assert recorder.decision.reason.endswith("operation not permitted when stream is capturing")
