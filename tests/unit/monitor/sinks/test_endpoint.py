"""`/metrics` over a real socket, read by Prometheus's own parser."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from flatout.errors import BadInput
from flatout.monitor.sinks.endpoint import ADDRESS, MetricsEndpoint
from tests.support.monitor import HOSTILE, story


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
    parser = pytest.importorskip("prometheus_client.parser")
    assert get(endpoint, "/metrics")[2] == ""
    for sample in story(seconds=3, name=HOSTILE):
        endpoint(sample)
    status, kind, text = get(endpoint, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    steps = families["flatout_job_steps"].samples[0]
    assert steps.labels["job_name"] == HOSTILE
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
