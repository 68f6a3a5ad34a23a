"""Samples in Prometheus's text format, for a scraper to fetch.

Names follow its conventions: a prefix, base units spelled out (seconds, bytes, watts), shares as ratios from
0 to 1, `_total` for what only grows.  A figure that is unknown is left out: absent is Prometheus's own word
for it.  Text of the job's (its name) appears only as an escaped label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from flatout.monitor.sample import Sample
from flatout.monitor.sinks.figures import Figure, figures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "flatout"
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


class Prometheus:
    """Keeps the last sample; `text` is what a scraper is answered."""

    def __init__(self) -> None:
        self._sample: Sample | None = None

    def __call__(self, sample: Sample) -> None:
        self._sample = sample

    def text(self) -> str:
        return "" if self._sample is None else exposition(self._sample)


def exposition(sample: Sample) -> str:
    """One sample in the text format."""
    job = {} if sample.job is None else {"job_name": sample.job.name or "", "pid": str(sample.job.pid)}
    names = {gpu.index: {"uuid": gpu.uuid or "", "name": gpu.name or ""} for gpu in sample.gpus}
    families: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
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
        kinds[name] = "counter" if name.endswith("_total") else "gauge"
        families.setdefault(name, []).append(f"{name}{_braces(labels)} {_number(figure.value)}")
    lines = []
    for name, values in families.items():
        lines += [f"# HELP {name} {_help(name)}", f"# TYPE {name} {kinds[name]}", *values]
    return "\n".join(lines) + "\n"


def metric_name(figure: Figure) -> str:
    """gpu power_w -> flatout_gpu_power_watts"""
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
