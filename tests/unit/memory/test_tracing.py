"""Both ways to a trace, as far as they go without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatout.errors import BadInput
from flatout.hardware.simulated import simulated_device
from flatout.memory.child import run_in_child
from flatout.memory.forecast import Forecaster, estimate_job, largest_batch
from flatout.memory.job import Recipe
from flatout.memory.tracing import check_kind, trace_natively
from tests.small_jobs import mlp_job

H200 = simulated_device("H200")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def test_an_estimate_says_how_it_was_traced() -> None:
    ruled = estimate_job(mlp_job(width=8), device="H200")
    assert not ruled.native and ruled.to_json()["native"] is False
    assert "natively" not in str(ruled)


@without_gpu
@pytest.mark.parametrize(
    "ask",
    [
        lambda: estimate_job(mlp_job(width=8), native=True),
        lambda: largest_batch(mlp_job(width=8), cap_bytes=1 << 30, native=True),
        lambda: run_in_child(trace_natively, mlp_job(width=8), Recipe(), {"batch_size": 2}, device=None),
    ],
    ids=["estimate", "largest batch", "in the child"],
)
def test_without_a_gpu_it_is_refused_in_one_line(ask: Callable[[], Any]) -> None:
    with pytest.raises(BadInput, match=r"^a native trace needs a CUDA GPU; ") as caught:
        ask()
    assert "\n" not in str(caught.value)


def test_a_gpu_of_another_generation_is_refused() -> None:
    with pytest.raises(BadInput, match="NVIDIA H200, and not of A100"):
        check_kind(simulated_device("A100-80GB"), name="NVIDIA H200", capability=(9, 0))
    for device in (None, H200, simulated_device("24GB")):
        check_kind(device, name="NVIDIA H200", capability=(9, 0))


def test_a_forecaster_traces_by_the_rules_unless_asked() -> None:
    assert not Forecaster(mlp_job(width=8)).native
