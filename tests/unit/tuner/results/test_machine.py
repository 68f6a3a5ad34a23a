from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.tuner.results import machine
from flatout.tuner.results.machine import Machine, differences, machine_of, main, measure_apart
from tests.unit.tuner.test_treatment import evidence

PROVEN = Machine(device="NVIDIA H200", cpu="fast", cores=16, torch="2.11.0+cu128")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """This machine, as NVML and the host describe it."""
    found = SimpleNamespace(gpus=[SimpleNamespace(name="NVIDIA H200")], cpu="fast", cores=16, torch="2.11.0")
    monkeypatch.setattr("flatout.hardware.nvml.read_gpus", lambda: SimpleNamespace(gpus=found.gpus))
    monkeypatch.setattr(
        "flatout.hardware.host.read_host", lambda: SimpleNamespace(cpu_model=found.cpu, cores=found.cores)
    )
    monkeypatch.setattr(machine, "installed_version", lambda package: found.torch)
    return found


def test_what_differs_from_the_machine_of_the_proof_is_named(here: SimpleNamespace) -> None:
    assert differences(PROVEN) == []
    here.gpus[0].name = "Tesla T4"
    here.cores, here.torch = 2, "2.13.0"
    assert differences(PROVEN) == [
        "Tesla T4 instead of NVIDIA H200",
        "2 cores instead of 16",
        "torch 2.13.0 instead of 2.11.0+cu128",
    ]
    here.gpus.clear()
    assert differences(PROVEN)[0] == "no GPU instead of NVIDIA H200"


def test_what_cannot_be_asked_does_not_differ(here: SimpleNamespace) -> None:
    here.cpu = here.cores = here.torch = None
    assert differences(PROVEN) == []
    assert differences(replace(PROVEN, device="cpu", cpu="unknown")) == []


def test_latencies_are_measured_and_a_process_that_fails_leaves_them_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(())
    printed = capsys.readouterr().out
    launch_s, read_s = json.loads(printed)
    assert launch_s > 0 and (read_s is None or read_s > 0)
    answers: list[Any] = [f"a warning\n{printed}", "no JSON", ""]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=answers.pop(0)))
    found = []
    for _ in range(3):
        measure_apart.cache_clear()
        found.append(measure_apart())
    assert found == [(launch_s, read_s), (None, None), (None, None)]
    assert measure_apart() == (None, None)  # once in a process
    measure_apart.cache_clear()


def test_a_machine_is_that_of_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure_apart", lambda: (1e-6, 2e-6))
    found = machine_of(evidence())
    assert (found.device, found.cores, found.launch_s, found.device_to_host_s) == ("cpu", 2, 1e-6, 2e-6)
