"""What a browser is sent: server-sent events, each a line of JSON.

    runs      the runs there are, and which to open first
    history   the figures of a run as columns, to be put in the place of those from its first moment on
    ready     every run that was asked for has been sent
    sample    one more sample of a run, whole, with the verdict
    beat      nothing; a browser that hears none for a while connects again

An event's id is the time of its sample in milliseconds.  A browser that connects again says the last id it
saw, to whichever server then answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flatout.codec import encode, rounded
from flatout.measure import PHASES
from flatout.monitor.sample import Sample, lean
from flatout.monitor.verdicts.window import Verdict

DIGITS = 5
MOST_NOTES = 40
HOLE_S = 5.0  # longer between two samples, and no line is drawn from one to the other
HOST_FIGURES = ("cpu_share", "memory_used_bytes")
JOB_FIGURES = ("steps_per_s", "loss", "allocated_bytes", "reserved_bytes")
GPU_FIGURES = ("utilisation_share", "sm_active_share", "memory_used_bytes", "power_w")
BEAT = b"event: beat\ndata: {}\n\n"
RETRY = b"retry: 1000\n\n"


def event(name: str, document: Mapping[str, Any] | str, *, time_s: float | None = None) -> bytes:
    """Encode one event; its JSON is one line of ASCII, whatever the texts hold."""
    text = document if isinstance(document, str) else json.dumps(_plain(document), separators=(",", ":"))
    identity = "" if time_s is None else f"id: {identity_of(time_s)}\n"
    return f"event: {name}\n{identity}data: {text}\n\n".encode()


def identity_of(time_s: float) -> str:
    return str(round(time_s * 1000))


def time_of(identity: str | None) -> float | None:
    """Parse the id that a browser sent back; None if there is none or it makes no sense."""
    is_id = identity is not None and identity.isascii() and identity.isdigit() and len(identity) < 16
    return int(identity) / 1000 if is_id and identity is not None else None


def sample_document(sample: Sample, *, run: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    data = lean(rounded(encode(sample), digits=DIGITS))
    data["time_s"] = round(sample.time_s, 3)
    return {"run": run, "sample": data, "verdicts": [lean(encode(verdict)) for verdict in verdicts]}


def history_json(samples: Sequence[Sample], *, is_whole: bool, latest: Mapping[str, Any]) -> str:
    """Write a history document as text: it is mostly columns, written number by number."""
    notes = [(round(sample.time_s, 3), note) for sample in samples for note in sample.notes]
    head = json.dumps(
        _plain({**latest, "is_whole": is_whole, "notes": notes[-MOST_NOTES:]}), separators=(",", ":")
    )
    times, columns = _columns(samples)
    start_s = times[0] if times else 0.0
    at_s = ",".join(f"{time_s - start_s:.2f}" for time_s in times)
    shown = ",".join(f'"{path}":[{",".join(values)}]' for path, values in columns.items())
    return f'{head[:-1]},"start_s":{start_s:.3f},"at_s":[{at_s}],"columns":{{{shown}}}}}'


def _columns(samples: Sequence[Sample]) -> tuple[list[float], dict[str, list[str]]]:
    """Return times and, by path, the values as JSON; a hole in time is a row of nulls."""
    rows: list[dict[str, float]] = []
    times: list[float] = []
    before_s: float | None = None
    for sample in samples:
        if before_s is not None and sample.start_s - before_s > HOLE_S:
            times.append((before_s + sample.start_s) / 2)
            rows.append({})
        times.append(sample.time_s)
        rows.append(dict(charted(sample)))
        before_s = sample.time_s
    paths = dict.fromkeys(path for row in rows for path in row)
    return times, {path: [f"{row[path]:.4g}" if path in row else "null" for row in rows] for path in paths}


def charted(sample: Sample) -> Iterator[tuple[str, float]]:
    """Yield the known figures that charts show, by path: gpu/0/power_w."""
    groups: list[tuple[str, Any, tuple[str, ...]]] = [("host", sample.host, HOST_FIGURES)]
    groups += [(f"gpu/{gpu.label}", gpu, GPU_FIGURES) for gpu in sample.gpus]
    if sample.job is not None:
        groups.append(("job", sample.job, JOB_FIGURES))
    for group, row, names in groups:
        for name in names:
            value = getattr(row, name)
            if value is not None and math.isfinite(value):
                yield f"{group}/{name}", value
    for field in ("phases", "device_phases") if sample.job is not None else ():
        shares = getattr(sample.job, field) or {}
        yield from ((f"job/{field}/{phase}", shares.get(phase, 0.0)) for phase in PHASES if shares)


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
