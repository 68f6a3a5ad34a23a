"""The text format, read by Prometheus's own client, with names by its conventions."""

from __future__ import annotations

import http.client
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample
from flatout.monitor.sinks.prometheus import ADDRESS, MetricsEndpoint, exposition
from tests.support.monitor import HOSTILE

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
    assert exposition(None) == ""


@given(name=st.text())
def test_a_hostile_name_is_one_label_and_nothing_else(name: str) -> None:
    found = families(full(name=name))
    assert found.keys() == families(full()).keys()
    assert {one.labels["job_name"] for one in found["flatout_job_loss"].samples} == {name}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_went_wrong_is_told(loss: float) -> None:
    (one,) = families(full(loss=loss))["flatout_job_loss"].samples
    assert one.value == loss or math.isnan(one.value) == math.isnan(loss)


# `/metrics` over a real socket, read by Prometheus's own parser


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    served = MetricsEndpoint(0)
    yield served
    served.close()


def get(endpoint: MetricsEndpoint, path: str, **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(ADDRESS, endpoint.port, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


def test_a_scraper_reads_the_last_sample(endpoint: MetricsEndpoint) -> None:
    assert get(endpoint, "/metrics")[2] == ""
    for loss in (1.0, 0.25):
        endpoint(full(name=HOSTILE, loss=loss))
    status, kind, text = get(endpoint, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found = {family.name: family for family in parser.text_string_to_metric_families(text)}
    steps = found["flatout_job_steps"].samples[0]
    assert steps.labels["job_name"] == HOSTILE
    assert [one.value for one in found["flatout_job_loss"].samples] == [0.25]
    assert endpoint.url == f"http://{ADDRESS}:{endpoint.port}/metrics"


def test_nothing_else_is_served(endpoint: MetricsEndpoint) -> None:
    assert get(endpoint, "/")[0] == 404
    assert get(endpoint, "/metrics/../etc/passwd")[0] == 404


def test_a_page_of_another_site_is_refused(endpoint: MetricsEndpoint) -> None:
    assert get(endpoint, "/metrics", Host="rebound.example:80")[0] == 403
    assert get(endpoint, "/metrics", Host=f"localhost:{endpoint.port}")[0] == 200


def test_a_port_that_is_taken_or_is_none_is_named(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(BadInput, match=f"port {endpoint.port} of 127.0.0.1 cannot be served"):
        MetricsEndpoint(endpoint.port)
    with pytest.raises(BadInput, match="port 99999"):
        MetricsEndpoint(99999)
