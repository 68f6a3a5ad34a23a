"""What a recorded step reads: which tensors of a batch, and when two batches may share a recording.

The recording itself runs in tests/gpu/test_adapters_on_gpu.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.engines.adapters.lora.blocks import Block
from flatout.engines.adapters.lora.graphs import signature, tensors_of, with_tensors
from tests.support.adapters_packed import blocks


@dataclass(frozen=True, kw_only=True)
class Given:
    """A batch with everything that a task may put into one."""

    block: Block
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
