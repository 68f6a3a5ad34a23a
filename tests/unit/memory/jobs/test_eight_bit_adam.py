"""Adam in eight bits: the states bitsandbytes keeps, by arithmetic."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from flatout.memory.jobs.eight_bit_adam import BLOCK, SMALLEST, EightBitAdam, eight_bit_named, without_data
from flatout.memory.jobs.job import adamw, optimizer_named
from flatout.memory.trace.record import Trace
from tests.support.memory import job_of, traced

WIDTH = 512


def layer_trace(make_optimizer: Any) -> Trace:
    return traced(
        job_of(
            lambda: nn.Linear(WIDTH, WIDTH),
            lambda batch_size: torch.randn(batch_size, WIDTH),
            make_optimizer=make_optimizer,
        )
    )


def state_bytes(trace: Trace) -> list[int]:
    return sorted(each.num_bytes for each in trace.storages if each.component == "optimizer state")


@pytest.mark.parametrize(
    "name",
    ["adamw_8bit", "adamw_bnb_8bit", "bitsandbytes.optim.AdamW8bit", "bnb.optim.Adam8bit", "ADAMW_8BIT"],
)
def test_a_name_of_a_config_gives_two_bytes_a_value_and_scales(name: str) -> None:
    make = optimizer_named(name)
    assert make is not None
    count = WIDTH * WIDTH
    weight = [count, count, 4 * count // BLOCK, 4 * count // BLOCK]
    bias = [4 * WIDTH, 4 * WIDTH]  # fewer than 4096 values: in float32
    tables = [4 * 256, 4 * 256]
    assert state_bytes(layer_trace(make)) == sorted([*weight, *bias, *tables])


def test_paged_states_are_no_part_of_the_allocator() -> None:
    make = optimizer_named("paged_adamw_8bit")
    assert make is not None
    assert WIDTH * WIDTH not in state_bytes(layer_trace(make))


def test_it_is_about_a_quarter_of_plain_adam() -> None:
    make = optimizer_named("adamw_8bit")
    eight, plain = sum(state_bytes(layer_trace(make))), sum(state_bytes(layer_trace(adamw)))
    assert 0.25 < eight / plain < 0.27


def test_other_names_are_none_of_it() -> None:
    assert eight_bit_named("adamw") is None
    assert eight_bit_named("lion_8bit") is None
    assert optimizer_named("no such optimizer") is None


def test_an_optimizer_of_bitsandbytes_is_stepped_by_its_arithmetic() -> None:
    parameters = [nn.Parameter(torch.zeros(SMALLEST)), nn.Parameter(torch.zeros(SMALLEST - 1))]
    theirs = type("AdamW8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adamw"})(parameters)
    theirs.args = types.SimpleNamespace(optim_bits=8, min_8bit_size=SMALLEST)
    ours = without_data(theirs)
    assert isinstance(ours, EightBitAdam)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    ours.step()
    assert ours.state[parameters[0]]["state1"].dtype is torch.uint8
    assert ours.state[parameters[1]]["state1"].dtype is torch.float32
    plain = torch.optim.SGD(parameters)
    assert without_data(plain) is plain
    assert without_data(None) is None


def test_a_step_makes_states_once_and_skips_what_has_no_gradient() -> None:
    used, unused = nn.Parameter(torch.zeros(SMALLEST)), nn.Parameter(torch.zeros(SMALLEST))
    optimizer = EightBitAdam([used, unused])
    used.grad = torch.zeros_like(used)
    assert optimizer.step(lambda: 3.0) == 3.0
    kept = optimizer.state[used]["state1"]
    optimizer.step()
    assert optimizer.state[used]["state1"] is kept
    assert unused not in optimizer.state
