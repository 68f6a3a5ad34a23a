"""Both ways to a trace, as far as they go without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.ground.errors import BadInput, ForkUnusable
from flatout.hardware.simulated import simulated_device
from flatout.memory.jobs.job import Recipe
from flatout.memory.predict.forecast import Forecaster, estimate_job
from flatout.memory.process.isolated_process import run_isolated
from flatout.memory.trace import make_trace
from flatout.memory.trace.make_trace import (
    capability_of,
    check_kind,
    multiprocessors_of,
    trace_natively,
)
from tests.support.memory import mlp_job

HERE = Path(__file__).parents[3] / "cuda_without_gpu"
NATIVELY = partial(trace_natively, device=None)
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
        lambda: Forecaster(mlp_job(width=8), native=True).largest_batch(Recipe(), cap_bytes=1 << 30),
        lambda: run_isolated(NATIVELY, mlp_job(width=8), Recipe(), {"batch_size": 2}, what="a native trace"),
    ],
    ids=["estimate", "largest batch", "in the child"],
)
def test_without_a_gpu_it_is_refused_in_one_line(ask: Callable[[], Any]) -> None:
    with pytest.raises(BadInput, match=r"^a native trace needs a CUDA GPU; ") as caught:
        ask()
    assert "\n" not in str(caught.value)


def refuse() -> None:
    raise ForkUnusable("a backward was run before this process was forked")


def test_where_a_forked_child_runs_no_backward_another_process_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a backward on a machine with a GPU; a forked child inherits the refusal, another one not."""
    expected = estimate_job(mlp_job(width=8)).peak_reserved_bytes
    monkeypatch.setattr(make_trace, "check_backward", refuse)
    assert estimate_job(mlp_job(width=8)).peak_reserved_bytes == expected


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answers of tests/cuda_without_gpu, where PyTorch has no CUDA and a compiler is at hand."""
    compiler = shutil.which("g++")
    if torch.version.cuda is not None or compiler is None:
        pytest.skip("needs a build of torch without CUDA, and g++")
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    place = Path(torch.__file__).parent
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", "-o", str(library)]
    options += [f"-I{place / 'include'}", f"-L{place / 'lib'}", f"-Wl,-rpath,{place / 'lib'}"]
    command = [compiler, str(HERE / "guard.cpp"), *options, "-ltorch_cpu", "-lc10"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"this torch cannot be extended: {built.stderr.splitlines()[0]}")
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, HERE / "compared.py"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_native_traces_take_what_the_rules_say_where_no_gpu_chooses(compared: Any) -> None:
    """All but fused attention: PyTorch's own choices on CUDA, byte for byte those of the rules."""
    assert len(compared["cases"]) == 14
    for name, found in compared["cases"].items():
        assert found["native"] == found["rules"], name
        assert found["guesses"][0] == found["guesses"][1], name
        assert found["is_native"] == [True, False]


def test_native_traces_are_replayed_like_others(compared: Any) -> None:
    replayed, fresh = compared["replayed"]
    assert replayed == fresh


def test_a_gpu_of_another_generation_is_refused() -> None:
    with pytest.raises(BadInput, match="NVIDIA H200, not for A100"):
        check_kind(simulated_device("A100-80GB"), name="NVIDIA H200", capability=(9, 0))
    for device in (None, H200, simulated_device("24GB")):
        check_kind(device, name="NVIDIA H200", capability=(9, 0))


def test_a_forecaster_traces_by_the_rules_unless_asked() -> None:
    assert not Forecaster(mlp_job(width=8)).native


def test_the_capability_is_that_of_the_device() -> None:
    assert capability_of(None) is None
    assert capability_of(simulated_device("H200")) == (9, 0)
    assert capability_of(simulated_device("T4")) == (7, 5)


def test_multiprocessors_are_those_of_the_datasheet() -> None:
    assert multiprocessors_of(simulated_device("A100-80GB")) == 108
    assert multiprocessors_of(simulated_device("24GB")) is None
    assert multiprocessors_of(None) is None
