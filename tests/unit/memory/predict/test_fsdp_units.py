from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.predict.fsdp_units import (
    ShardedParameter,
    ShardUnit,
    block_of_name,
    units_of,
    units_of_job,
)
from tests.support import memory_ranks as ranks


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("encoder.layer.3.attention.query", "encoder.layer.3"),
        ("layers.11", "layers.11"),
        ("0.1.conv", "0"),
        ("layer1.0.conv1", "layer1.0"),
        ("embeddings.word", ""),
        ("conv2d", ""),
        ("", ""),
    ],
)
def test_a_block_is_what_has_a_number(name: str, block: str) -> None:
    assert block_of_name(name) == block


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    num_ranks=st.integers(1, 17),
    element_bytes=st.sampled_from([2, 4]),
)
def test_a_chunk_is_that_of_torch(shape: list[int], num_ranks: int, element_bytes: int) -> None:
    piece = ShardedParameter(shape=tuple(shape), element_bytes=element_bytes)
    first = torch.chunk(torch.empty(shape, device="meta"), num_ranks)[0]
    assert piece.shard_elements(num_ranks) == first.numel()
    assert piece.num_bytes == math.prod(shape) * element_bytes
    assert piece.gathered_bytes(num_ranks) >= piece.num_bytes


def test_a_scalar_is_refused() -> None:
    with pytest.raises(BadInput, match="without dimensions"):
        ShardedParameter(shape=(), element_bytes=4).shard_bytes(2)


def test_a_unit_holds_what_lies_in_it() -> None:
    unit = ShardUnit(name="layers.1", pieces=())
    assert unit.holds("layers.1") and unit.holds("layers.1.up")
    assert not any(unit.holds(other) for other in ("layers.11", "layers", "", None))
    assert not ShardUnit(name="", pieces=()).holds("layers.1")


def test_units_hold_every_parameter_once() -> None:
    model = ranks.PartlyFrozen()
    model.head.weight = torch.nn.Parameter(torch.zeros(ranks.WIDTH, ranks.WIDTH))
    model.first.weight = model.head.weight
    found = units_of(model)
    assert [unit.name for unit in found] == ["", *(f"blocks.{i}" for i in range(ranks.NUM_BLOCKS))]
    pieces = [piece for unit in found for piece in unit.pieces]
    assert sum(piece.num_bytes for piece in pieces) == 4 * sum(p.numel() for p in model.parameters())
    assert [len(unit.trainable) for unit in found[1:]] == [2, 0, 4]
    assert found[1].gathered_bytes(2) == 2 * found[1].shard_bytes(2)


def test_a_jobs_model_is_made_without_memory() -> None:
    job = Job(name="ranks", make_model=ranks.Model, make_batch=ranks.make_batch, loss=ranks.loss)
    assert units_of_job(job, Recipe()) == units_of(ranks.Model())
    halves = units_of_job(job, Recipe(precision="pure-bf16"))
    assert {piece.element_bytes for unit in halves for piece in unit.pieces} == {2}
