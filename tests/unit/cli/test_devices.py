"""`flatout devices` as a user meets it: this machine, a machine of played GPUs, and a name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import flatout.hardware.nvml
from flatout.cli.devices import devices
from flatout.ground.codec import decode
from flatout.ground.errors import BadInput, UnknownDevice
from flatout.hardware.device import Device
from flatout.hardware.host import HostFacts, read_host
from flatout.hardware.matching import all_datasheets
from flatout.hardware.nvml import GpuReader
from flatout.hardware.snapshot import Snapshot
from flatout.testing.played_nvml import (
    BINDINGS,
    NOT_SUPPORTED,
    PlayedGpu,
    PlayedNvml,
    RefusedAnswer,
    played_mig_gpu,
)


def run(*arguments: str, columns: int = 120) -> Result:
    app = typer.Typer(add_completion=False)
    app.command()(devices)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def document(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0
    parsed = json.loads(result.stdout)
    assert isinstance(parsed, dict)
    assert set(parsed) == {"format", "version", "host", "snapshot", "devices", "datasheets"}
    assert (parsed["format"], parsed["version"]) == ("flatout-devices", 1)
    return parsed


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the command find these GPUs."""

    def found(*gpus: PlayedGpu, visible: str | None = None, **system: Any) -> None:
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        reader = GpuReader(PlayedNvml(*gpus, **system), environ=environ)
        monkeypatch.setattr(flatout.hardware.nvml, "read_gpus", reader.snapshot)

    return found


def test_this_machine() -> None:
    result = run()
    assert result.exit_code == 0
    assert "host" in result.stdout
    assert "/dev/shm" in result.stdout


def test_this_machine_as_a_document() -> None:
    parsed = document()
    snapshot = decode(Snapshot, parsed["snapshot"])
    assert decode(HostFacts, parsed["host"]).machine_cores == read_host().machine_cores
    assert snapshot.gpus or snapshot.missing["gpus"]
    assert parsed["datasheets"] is None


def test_without_a_driver_it_says_why_and_ends_well(play: Any) -> None:
    play(nvmlInit=RefusedAnswer(BINDINGS.NVML_ERROR_LIBRARY_NOT_FOUND))
    result = run()
    assert result.exit_code == 0
    assert (
        result.stdout.splitlines()[0] == "no GPU: no NVIDIA driver: the NVML library is not on this machine"
    )


def test_hidden_gpus_are_the_reason(play: Any) -> None:
    play(PlayedGpu(), visible="")
    assert run().stdout.startswith("no GPU: CUDA_VISIBLE_DEVICES is empty")


def test_a_machine_without_gpus_but_with_a_driver(play: Any) -> None:
    play()
    assert run().stdout.startswith("no GPU: the driver sees no GPU")


def test_a_gpu_with_its_process_and_peaks(play: Any) -> None:
    play(PlayedGpu())
    text = run().stdout
    for words in (
        "NVIDIA H200",
        "621 MiB/140 GiB",
        "1 %",
        "84/700 W",
        "1980/1980 MHz",
        "38 °C",
        "gen 5 x16",
        "433",
        "python3",
        "612 MiB",
        "bf16 989",
        "4,800 GB/s",
        "580.159.04, CUDA up to 13.0",
    ):
        assert words in text, words
    assert "n/a" not in text


def test_a_narrow_terminal_keeps_figures_whole(play: Any) -> None:
    play(PlayedGpu())
    text = run(columns=80).stdout
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "621 MiB/140 GiB" in text
    assert "1980/1980 MHz" in text


def test_unknown_figures_are_shown_as_such_with_their_reason(play: Any) -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetPowerUsage"] = NOT_SUPPORTED
    gpu.answers["nvmlDeviceGetUtilizationRates"] = NOT_SUPPORTED
    play(gpu)
    text = run().stdout
    assert "n/a/700 W" in text
    assert "GPU 0: utilisation_share, memory_utilisation_share, power_w (NVML: Not Supported)" in " ".join(
        text.split()
    )


def test_what_holds_the_clocks_is_said(play: Any) -> None:
    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetCurrentClocksEventReasons"] = 0x44
    play(gpu)
    assert "GPU 0: power cap, thermal limit (hardware)" in run().stdout


def test_instances_are_listed_under_their_gpu(play: Any) -> None:
    play(played_mig_gpu())
    lines = run().stdout.splitlines()
    starts = [line.split()[0] for line in lines if line[:1].isdigit()]
    assert starts[:3] == ["0", "0:0", "0:2"]
    assert any(line.startswith("n/a GPU 0:0, GPU 0:2: utilisation_share") for line in lines)


def test_many_processes_are_counted_not_listed(play: Any) -> None:
    from types import SimpleNamespace

    gpu = PlayedGpu()
    gpu.answers["nvmlDeviceGetComputeRunningProcesses"] = [
        SimpleNamespace(pid=1000 + number, usedGpuMemory=number) for number in range(14)
    ]
    play(gpu)
    assert "and 4 more processes" in run().stdout


def test_a_device_that_is_not_here() -> None:
    result = run("a100 80gb")
    assert result.exit_code == 0
    assert "A100-SXM4-80GB (simulated)" in result.stdout
    assert "80.0 GiB" in result.stdout
    assert "bf16 312" in result.stdout
    assert "NVIDIA A100 data sheet" in result.stdout


def test_a_device_of_so_much_memory() -> None:
    (device,) = document("24GB")["devices"]
    assert decode(Device, device).memory_bytes == 23028 * 2**20
    assert "only its memory was given" in run("24GB").stdout


def test_an_unknown_name_is_an_error_for_the_command_to_show() -> None:
    error = run("A1000").exception
    assert isinstance(error, UnknownDevice)
    assert error.hint


def test_a_name_and_the_table_are_two_questions() -> None:
    assert isinstance(run("T4", "--datasheet").exception, BadInput)


@pytest.mark.parametrize("flag", ["--datasheet", "--all"])
def test_the_table_lists_every_row(flag: str) -> None:
    text = run(flag).stdout
    for row in all_datasheets():
        assert row.name in text
    assert "dense" in text


def test_the_table_as_a_document_names_sources_and_memory() -> None:
    rows = document("--datasheet")["datasheets"]
    assert len(rows) == len(all_datasheets())
    assert all(row["source"] and row["memory_bytes"] > 0 and isinstance(row["bf16"], bool) for row in rows)
