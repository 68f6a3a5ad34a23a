"""The text format, read by Prometheus's own client, with names by its conventions."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample
from flatout.monitor.sinks.prometheus import Prometheus, exposition

parser = pytest.importorskip("prometheus_client.parser")


def full(*, name: str = "train", loss: float = 0.5) -> Sample:
    """A sample in which every number is known."""
    numbers: dict[type, dict[str, Any]] = {}
    for shape in (HostSample, GpuSample, JobSample):
        hints = {field: str(hint) for field, hint in shape.__annotations__.items()}
        numbers[shape] = {
            field: 1 if hint.startswith("int") else 0.5
            for field, hint in hints.items()
            if hint.startswith(("int |", "float |")) and field != "mig_index"
        }
    phases = {"wait": 0.25, "rest": 0.75}
    return Sample(
        time_s=1.0,
        host=HostSample(**numbers[HostSample]),
        gpus=tuple(
            GpuSample(index=index, name="H200", uuid=f"GPU-{index}", **numbers[GpuSample]) for index in (0, 1)
        ),
        job=JobSample(
            pid=7, phases=phases, device_phases=phases, **(numbers[JobSample] | {"name": name, "loss": loss})
        ),
    )


def families(sample: Sample) -> dict[str, Any]:
    return {family.name: family for family in parser.text_string_to_metric_families(exposition(sample))}


def test_the_clients_parser_reads_every_figure_with_its_labels() -> None:
    found = families(full())
    assert len(found) > 30
    power = found["flatout_gpu_power_watts"]
    assert power.type == "gauge"
    assert [one.labels for one in power.samples] == [
        {"gpu": str(index), "uuid": f"GPU-{index}", "name": "H200"} for index in (0, 1)
    ]
    assert found["flatout_gpu_energy_joules"].type == "counter"
    assert found["flatout_job_steps"].type == "counter"
    (wait,) = [one for one in found["flatout_job_phase_ratio"].samples if one.labels["phase"] == "wait"]
    assert (wait.value, wait.labels["job_name"]) == (0.25, "train")


def test_names_have_base_units_and_one_prefix() -> None:
    names = {line.split(" ")[2] for line in exposition(full()).splitlines() if line.startswith("# TYPE ")}
    assert all(re.fullmatch(r"flatout_(host|gpu|job)_[a-z_]+", name) for name in names)
    abbreviated = ("_s", "_j", "_w", "_c", "_hz", "_share", "_pct", "_ms", "_mib", "_per_s")
    assert not [name for name in names if name.endswith(abbreviated)]
    assert "flatout_host_disk_read_bytes_per_second" in names
    assert "flatout_job_energy_per_step_joules" in names
    assert "flatout_gpu_utilisation_ratio" in names
    assert "flatout_job_step_seconds" in names


def test_every_family_has_a_help_and_a_type_once() -> None:
    text = exposition(full())
    helps, types = (re.findall(rf"^# {word} (\S+)", text, flags=re.MULTILINE) for word in ("HELP", "TYPE"))
    assert helps == types
    assert len(set(types)) == len(types)


def test_unknown_is_absent_and_never_zero() -> None:
    text = exposition(Sample(time_s=1.0, gpus=(GpuSample(index=0, power_w=0.0),)))
    assert 'flatout_gpu_power_watts{gpu="0",uuid="",name=""} 0.0' in text
    assert "temperature" not in text
    assert Prometheus().text() == ""


@given(name=st.text())
def test_a_hostile_name_is_one_label_and_nothing_else(name: str) -> None:
    found = families(full(name=name))
    assert found.keys() == families(full()).keys()
    assert {one.labels["job_name"] for one in found["flatout_job_loss"].samples} == {name}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_went_wrong_is_told(loss: float) -> None:
    (one,) = families(full(loss=loss))["flatout_job_loss"].samples
    assert one.value == loss or math.isnan(one.value) == math.isnan(loss)


def test_the_last_sample_is_what_a_scraper_gets() -> None:
    sink = Prometheus()
    sink(full(loss=1.0))
    sink(full(loss=0.25))
    assert "flatout_job_loss" in sink.text()
    assert " 0.25" in sink.text()
