"""Samples in Prometheus's text format, and `/metrics` on the loopback for a scraper of this machine.

Names follow its conventions: a prefix, base units spelled out (seconds, bytes, watts), shares as ratios from
0 to 1, `_total` for what only grows.  A figure that is unknown is left out: absent is Prometheus's own word
for it.  Text of the job's (its name) appears only as an escaped label.

The endpoint sends nothing by itself: it answers requests from this machine, and refuses requests that a
web page of another site could make the browser send (their Host header names that site).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flatout.ground.errors import BadInput
from flatout.monitor.sample import Sample
from flatout.monitor.sinks.figures import Figure, figures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "flatout"
ADDRESS = "127.0.0.1"
OWN_NAMES = (ADDRESS, "localhost")
PATH = "/metrics"
# Endings of our names -> those of Prometheus; the longest that fits is taken.
UNITS = {
    "_bytes_per_s": "_bytes_per_second",
    "_per_s": "_per_second",
    "_per_step_j": "_per_step_joules",
    "_per_sample_j": "_per_sample_joules",
    "_share": "_ratio",
    "_bytes": "_bytes",
    "_hz": "_hertz",
    "_w": "_watts",
    "_c": "_celsius",
    "_s": "_seconds",
}
COUNTERS = {"energy_j": "energy_joules_total", "steps": "steps_total", "samples": "samples_total"}


def exposition(sample: Sample | None) -> str:
    """Write one sample in the text format; nothing before the first."""
    if sample is None:
        return ""
    job = {} if sample.job is None else {"job_name": sample.job.name or "", "pid": str(sample.job.pid)}
    names = {gpu.index: {"uuid": gpu.uuid or "", "name": gpu.name or ""} for gpu in sample.gpus}
    families: dict[str, list[str]] = {}
    for figure in figures(sample):
        if figure.value is None:
            continue
        labels: dict[str, str] = {}
        if figure.group == "job":
            labels = dict(job)
        elif figure.gpu is not None:
            labels = {"gpu": figure.gpu, **names[int(figure.gpu.partition(".")[0])]}
        if "/" in figure.name:
            labels["phase"] = figure.name.partition("/")[2]
        name = metric_name(figure)
        families.setdefault(name, []).append(f"{name}{_braces(labels)} {_number(figure.value)}")
    lines = []
    for name, values in families.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {_help(name)}", f"# TYPE {name} {kind}", *values]
    return "\n".join(lines) + "\n"


def metric_name(figure: Figure) -> str:
    """Name a figure for Prometheus: gpu power_w -> flatout_gpu_power_watts."""
    name = figure.name.partition("/")[0]
    if "/" in figure.name:
        name = f"{name.removesuffix('s')}_ratio"
    name = COUNTERS.get(name, name)
    for ending, unit in UNITS.items():
        if name.endswith(ending):
            name = name.removesuffix(ending) + unit
            break
    return f"{PREFIX}_{figure.group}_{name}"


def _help(name: str) -> str:
    words = name.removeprefix(f"{PREFIX}_").removesuffix("_total").replace("_", " ")
    return f"{words[0].upper()}{words[1:]}."


def _braces(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{shown}}}" if shown else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


# The endpoint


class MetricsEndpoint:
    """A sink that serves what it was given last; port 0 takes any that is free."""

    def __init__(self, port: int) -> None:
        try:
            self._server = _MetricsServer((ADDRESS, port), _MetricsHandler)
        except (OSError, OverflowError) as error:
            raise BadInput(
                f"port {port} of {ADDRESS} cannot be served: {error}", hint="choose another, or 0 for any"
            ) from None
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="flatout-metrics", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}{PATH}"

    def __call__(self, sample: Sample) -> None:
        self._server.sample = sample

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True
    sample: Sample | None = None


class _MetricsHandler(BaseHTTPRequestHandler):
    server: _MetricsServer
    timeout = 10  # of a client that connects and says nothing

    def do_GET(self) -> None:
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if name not in OWN_NAMES:
            self.send_error(403)
        elif self.path.partition("?")[0] != PATH:
            self.send_error(404)
        else:
            body = exposition(self.server.sample).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Log nothing: a scrape is not news."""
