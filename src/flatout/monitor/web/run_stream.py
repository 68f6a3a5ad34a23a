"""One run as all its browsers see it: server-sent events, each a line of JSON.

    runs      the runs there are, and which to open first
    history   the figures of a run as columns, to be put in the place of those from its first moment on
    ready     every run that was asked for has been sent
    sample    one more sample of a run, whole, with the verdict
    beat      nothing; a browser that hears none for a while connects again

An event's id is the time of its sample in milliseconds.  A browser that connects again says the last id it
saw, to whichever server then answers.  Each event is encoded once for all browsers of a run.

A run is kept no finer than a chart can show.  The last ten minutes stay as they were sampled; what lies
before is merged into slots of equal length, some hundreds for the whole run however long it gets: a week is
drawn as well by 500 points as by 600,000.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.ground.codec import encode, name_nonfinite, round_floats
from flatout.measure import PHASES
from flatout.monitor.sample import Sample, charted_figures, drop_older, lean, merge
from flatout.monitor.verdicts.change import Change, find_change
from flatout.monitor.verdicts.verdict import WINDOW_S, verdicts
from flatout.monitor.verdicts.window import Verdict

DIGITS = 5
MOST_NOTES = 40
HOLE_S = 5.0  # longer between two samples, and no line is drawn from one to the other
BEAT = b"event: beat\ndata: {}\n\n"
RETRY = b"retry: 1000\n\n"
VERDICT_EVERY_S = 5.0  # a sentence stays for long enough to be read
OVERLAP_S = 30.0  # another run's log may be that late
RECENT_S = 600.0
MOST_RECENT = 900  # ten samples a second: a minute and a half
MOST_OLDER = 500
SLACK = 100  # samples between two mergers


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPosition:
    """How far a browser has got: the number of samples there were, and the time of the last."""

    count: int
    time_s: float | None


class RunStream:
    """The samples of one run, and their events."""

    def __init__(self, key: str, samples: Iterable[Sample] = ()) -> None:
        self.key = key
        self.latest: Sample | None = None
        self._past = Past()
        self._window: deque[Sample] = deque()  # as the terminal judges it: with the processes of the job
        self._count = 0
        self._verdicts: tuple[Verdict, ...] = ()
        self._change: Change | None = None
        self._judged_s: float | None = None
        self._judged_state: str | None = None
        self._event: bytes | None = None
        self._whole: bytes | None = None
        self.extend(samples)

    def extend(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._past.add(sample)
            self._window.append(sample)
            drop_older(self._window, WINDOW_S)
            self.latest = sample
            self._count += 1
            self._event = self._whole = None

    @property
    def position(self) -> StreamPosition:
        return StreamPosition(count=self._count, time_s=None if self.latest is None else self.latest.time_s)

    def since(self, position: StreamPosition | None) -> bytes:
        """Return what a browser at `position` has not seen: nothing, the last sample, or more."""
        if position is None:
            return self.whole()
        if self.latest is None or position.count == self._count:
            return b""
        if position.count == self._count - 1:
            return self._sample_event(self.latest)
        if position.time_s is None or position.time_s >= self.latest.time_s:
            return self.whole()
        return self._history(self._past.after(position.time_s), is_whole=False, time_s=self.latest.time_s)

    def after(self, time_s: float) -> list[Sample]:
        """Return the samples after `time_s`, without their processes."""
        return self._past.after(time_s)

    def whole(self) -> bytes:
        """Return the whole run, without an id: a browser that is cut off before the end asks again."""
        if self._whole is None:
            self._whole = self._history(self._past.samples, is_whole=True)
        return self._whole

    def again(self, time_s: float) -> bytes:
        """Return what a browser missed that was connected, perhaps to another server, until `time_s`."""
        return self._history(self._past.after(time_s - OVERLAP_S), is_whole=False)

    def _sample_event(self, sample: Sample) -> bytes:
        if self._event is None:
            document = self._document(sample)
            self._event = event("sample", document, time_s=sample.time_s)
        return self._event

    def _history(self, samples: Sequence[Sample], *, is_whole: bool, time_s: float | None = None) -> bytes:
        if self.latest is None:
            latest: dict[str, object] = {"run": self.key, "sample": None, "verdicts": []}
        else:
            latest = self._document(self.latest)
        return event("history", history_json(samples, is_whole=is_whole, latest=latest), time_s=time_s)

    def _document(self, sample: Sample) -> dict[str, Any]:
        verdicts = self._judge()
        change = None if self._change is None else str(self._change)
        return {**sample_document(sample, run=self.key, verdicts=verdicts), "change": change}

    def _judge(self) -> tuple[Verdict, ...]:
        assert self.latest is not None
        now_s, state = self.latest.time_s, None if self.latest.job is None else self.latest.job.state
        is_fresh = self._judged_s is not None and 0.0 <= now_s - self._judged_s < VERDICT_EVERY_S
        if not is_fresh or state != self._judged_state:
            self._verdicts, self._judged_s, self._judged_state = verdicts(self._window), now_s, state
            samples = self._past.samples
            rates = [(each, each.job.steps_per_s) for each in samples if each.job is not None]
            points = [(each.time_s, each.span_s or 1.0, rate) for each, rate in rates if rate is not None]
            self._change = find_change(points, start_s=samples[0].start_s)
        return self._verdicts


class Past:
    """Samples in order of time, without their processes."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self.samples: list[Sample] = []
        for sample in samples:
            self._append(sample)
        self._shorten()

    def add(self, sample: Sample) -> None:
        self._append(sample)
        if self._num_older() > MOST_OLDER + SLACK:
            self._shorten()

    def after(self, time_s: float) -> list[Sample]:
        """Return the samples after `time_s`."""
        later = itertools.takewhile(lambda sample: sample.time_s > time_s, reversed(self.samples))
        return list(later)[::-1]

    def _append(self, sample: Sample) -> None:
        # Time that was set back: a chart goes on from there, as the clock does.
        while self.samples and self.samples[-1].time_s >= sample.time_s:
            self.samples.pop()
        self.samples.append(replace(sample, processes=()) if sample.processes else sample)

    def _num_older(self) -> int:
        start_s = self.samples[-1].time_s - RECENT_S
        first_recent = bisect.bisect_left(self.samples, start_s, key=lambda sample: sample.time_s)
        return max(first_recent, len(self.samples) - MOST_RECENT)

    def _shorten(self) -> None:
        num_older = self._num_older() if self.samples else 0
        if num_older > MOST_OLDER:
            older, recent = self.samples[:num_older], self.samples[num_older:]
            self.samples = [*thin(older, most=MOST_OLDER), *recent]


def thin(samples: Sequence[Sample], *, most: int) -> list[Sample]:
    """Merge samples into at most `most`, each for an equal part of the time."""
    if len(samples) <= most:
        return list(samples)
    first_s, span_s = samples[0].time_s, samples[-1].time_s - samples[0].time_s

    def slot(sample: Sample) -> int:
        return min(int((sample.time_s - first_s) / span_s * most), most - 1)

    return [merge(list(group)) for _, group in itertools.groupby(samples, key=slot)]


# Events


def event(name: str, document: Mapping[str, Any] | str, *, time_s: float | None = None) -> bytes:
    """Encode one event; its JSON is one line of ASCII, whatever the texts hold."""
    text = document if isinstance(document, str) else dump(document)
    identity = "" if time_s is None else f"id: {identity_of(time_s)}\n"
    return f"event: {name}\n{identity}data: {text}\n\n".encode()


def dump(document: Mapping[str, Any]) -> str:
    """Write JSON on one line; NaN and infinity, which JSON lacks, by their names."""
    return json.dumps(name_nonfinite(document), separators=(",", ":"))


def identity_of(time_s: float) -> str:
    return str(round(time_s * 1000))


def time_of(identity: str | None) -> float | None:
    """Parse the id that a browser sent back; None if there is none or it makes no sense."""
    is_id = identity is not None and identity.isascii() and identity.isdigit() and len(identity) < 16
    return int(identity) / 1000 if is_id and identity is not None else None


def sample_document(sample: Sample, *, run: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    data = lean(round_floats(encode(sample), digits=DIGITS))
    data["time_s"] = round(sample.time_s, 3)
    return {"run": run, "sample": data, "verdicts": [lean(encode(verdict)) for verdict in verdicts]}


def history_json(samples: Sequence[Sample], *, is_whole: bool, latest: Mapping[str, Any]) -> str:
    """Write a history document as text: it is mostly columns, written number by number."""
    notes = [(round(sample.time_s, 3), note) for sample in samples for note in sample.notes]
    head = dump({**latest, "is_whole": is_whole, "notes": notes[-MOST_NOTES:]})
    times, rows = _rows(samples)
    start_s = times[0] if times else 0.0
    at_s = ",".join(f"{time_s - start_s:.2f}" for time_s in times)
    tables = {
        "columns": [
            {**dict(charted_figures(row)), **dict(_phases(row))} if row is not None else {} for row in rows
        ],
        "low": [row.low if row is not None else {} for row in rows],
        "high": [row.high if row is not None else {} for row in rows],
    }
    shown = ",".join(f'"{name}":{_columns(table)}' for name, table in tables.items())
    return f'{head[:-1]},"start_s":{start_s:.3f},"at_s":[{at_s}],{shown}}}'


def _rows(samples: Sequence[Sample]) -> tuple[list[float], list[Sample | None]]:
    """Return times and the sample of each; a hole in time is a row without one."""
    rows: list[Sample | None] = []
    times: list[float] = []
    before_s: float | None = None
    for sample in samples:
        if before_s is not None and sample.start_s - before_s > HOLE_S:
            times.append((before_s + sample.start_s) / 2)
            rows.append(None)
        times.append(sample.time_s)
        rows.append(sample)
        before_s = sample.time_s
    return times, rows


def _columns(rows: Sequence[Mapping[str, float]]) -> str:
    """Write rows as columns in JSON, by path; what a row does not know is null."""
    paths = dict.fromkeys(path for row in rows for path in row)
    columns = {path: [f"{row[path]:.4g}" if path in row else "null" for row in rows] for path in paths}
    shown = (f'"{path}":[{",".join(values)}]' for path, values in columns.items())
    return f"{{{','.join(shown)}}}"


def _phases(sample: Sample) -> Iterator[tuple[str, float]]:
    """Yield the shares of the step by path: job/phases/wait."""
    for field in ("phases", "device_phases") if sample.job is not None else ():
        shares = getattr(sample.job, field) or {}
        yield from ((f"job/{field}/{phase}", shares[phase]) for phase in PHASES if phase in shares)
