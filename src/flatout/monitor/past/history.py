"""The log of a run: bounded on disk, constant in memory, whole after a crash.

Three tiers hold the same run at three grains: every sample, one per minute, one per hour, each merged from
the tier before.  A tier is a row of files of JSON lines that are only ever appended to; a full one is
compressed (to about a tenth), and when a tier passes its budget its oldest file goes.  So the last hours
are there second by second, the weeks before minute by minute, and what lies further back hour by hour.

A line is written with one system call.  What a crash cuts off is the last line at most, and a reader drops
it.  Only the process that made the folder writes to it.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flatout.ground.codec import encode, round_floats
from flatout.ground.errors import BadInput
from flatout.ground.runs import LATEST_S, read_regular
from flatout.monitor.sample import Sample, lean, merge

MIB = 2**20
LARGEST_FILE = 16 * MIB  # as it is read; what is written here has at most one
DIGITS = 5
ROUNDING_S = 1.0  # of a span of hours, with that many digits
MOST_PENDING = 60
MOST_BYTES = 2 * MIB  # of the end of a tier
RECENT_BYTES = MIB // 8
RAW = "raw"
NAME = re.compile(r"(?P<tier>\w+)-(?P<number>\d{6,})\.jsonl(\.gz)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grain:
    """One tier of the log."""

    name: str
    period_s: float  # 0: every sample
    budget_bytes: int
    segment_bytes: int


GRAINS = (
    Grain(name=RAW, period_s=0.0, budget_bytes=20 * MIB, segment_bytes=MIB),
    Grain(name="minutes", period_s=60.0, budget_bytes=16 * MIB, segment_bytes=MIB),
    Grain(name="hours", period_s=3600.0, budget_bytes=4 * MIB, segment_bytes=MIB // 4),
)


class HistoryWriter:
    """Appends samples to a run's folder; a listener of the sampler."""

    def __init__(self, folder: Path, *, grains: tuple[Grain, ...] = GRAINS) -> None:
        self._tiers = [_Tier(folder, grain) for grain in grains]

    def __call__(self, sample: Sample) -> None:
        whole: Sample | None = sample
        for tier in self._tiers:
            if whole is None:
                return
            whole = tier.add(whole)

    def close(self) -> None:
        """Write the unfinished minute and hour."""
        for position, tier in enumerate(self._tiers):
            rest = tier.flush()
            if rest is not None and position + 1 < len(self._tiers):
                self._tiers[position + 1].pend(rest)
            tier.close()


class _Tier:
    """Collects samples until its period is over, then appends their merger to its files."""

    def __init__(self, folder: Path, grain: Grain) -> None:
        self._folder, self._grain = folder, grain
        self._pending: list[Sample] = []
        self._slot: int | None = None
        self._file: int | None = None
        self._number = 0
        self._size = 0

    def add(self, sample: Sample) -> Sample | None:
        """Add a sample; return the one to hand on: this one, or the merged period that it ends."""
        if not self._grain.period_s:
            self._append(sample)
            return sample
        slot = int(sample.time_s // self._grain.period_s)
        done = self.flush() if self._slot is not None and slot != self._slot else None
        self._slot = slot
        self.pend(sample)
        return done

    def pend(self, sample: Sample) -> None:
        self._pending.append(sample)
        if len(self._pending) >= MOST_PENDING:  # ten samples a second would be six hundred a minute
            self._pending = [merge(self._pending)]

    def flush(self) -> Sample | None:
        if not self._pending:
            return None
        merged = merge(self._pending)
        self._pending = []
        self._append(merged)
        return merged

    def _append(self, sample: Sample) -> None:
        line = line_of(sample)
        if self._file is None or self._size + len(line) > self._grain.segment_bytes:
            self._next_file()
        assert self._file is not None
        written = os.write(self._file, line)
        if written < len(line):  # the disk is full: half a line would spoil the next one
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path()))
        self._size += written

    def _next_file(self) -> None:
        self.close()
        if self._number:
            _compress(self._path())
        self._shrink()
        self._number += 1
        self._size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path(), flags, 0o644)

    def _path(self) -> Path:
        return self._folder / f"{self._grain.name}-{self._number:06d}.jsonl"

    def _shrink(self) -> None:
        """Leave room for one more file within the budget."""
        sizes = {path: path.stat().st_size for path in segments(self._folder, self._grain.name).values()}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= self._grain.budget_bytes - self._grain.segment_bytes:
                return
            path.unlink()
            total -= size

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def line_of(sample: Sample) -> bytes:
    """Encode a sample as a line of the log."""
    data = lean(round_floats(encode(sample), digits=DIGITS))
    # Five digits are enough for a figure, but not for a date, nor for a counter to be subtracted from.
    data["time_s"] = round(sample.time_s, 3)
    for gpu, written in zip(sample.gpus, data.get("gpus", ()), strict=False):
        if gpu.energy_j is not None:
            written["energy_j"] = round(gpu.energy_j, 1)
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _compress(path: Path) -> None:
    """Compress a file under another name first, so that a reader always finds a whole one."""
    final = path.with_name(f"{path.name}.gz")
    temporary = path.with_name(f".{final.name}")
    temporary.write_bytes(gzip.compress(path.read_bytes(), compresslevel=6, mtime=0))
    temporary.replace(final)
    path.unlink()


# Reading


def segments(folder: Path, tier: str) -> dict[int, Path]:
    """List the files of a tier by number, oldest first."""
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        # Where a crash left a file and its compressed twin, they hold the same.
        if match is not None and match["tier"] == tier:
            found[int(match["number"])] = path
    return dict(sorted(found.items()))


def read_tier(folder: Path, tier: str, *, after_s: float = float("-inf")) -> Iterator[Sample]:
    """Read the samples of a tier after `after_s`, oldest first, one file in memory at a time."""
    for path in segments(folder, tier).values():
        whole = _whole_lines(path)
        if whole is None:  # it was compressed or dropped since it was listed
            whole = _whole_lines(path.with_name(f"{path.name}.gz"))
        yield from (sample for sample in parse_lines(whole or b"") if sample.time_s > after_s)


def replay(folder: Path, *, finest: str = RAW) -> Iterator[Sample]:
    """Read the whole run, oldest first, each part at the finest grain that is left.

    With `finest="minutes"`, seconds are read only for the end, which is not yet a whole minute.
    """
    tiers = [grain.name for grain in reversed(GRAINS)]
    if finest != RAW:
        tiers.remove(RAW)
    starts = [next((sample.start_s for sample in read_tier(folder, tier)), None) for tier in tiers]
    end_s = float("-inf")
    for position, tier in enumerate(tiers):
        finer = [start_s for start_s in starts[position + 1 :] if start_s is not None]
        for sample in read_tier(folder, tier, after_s=end_s):
            if finer and sample.start_s >= min(finer) - ROUNDING_S:
                break
            yield sample
            end_s = sample.time_s
    if finest != RAW:
        yield from (sample for sample in read_end(folder, RAW) if sample.time_s > end_s)


def read_end(folder: Path, tier: str, *, most_bytes: int = MOST_BYTES) -> Iterator[Sample]:
    """Read the last files of a tier, about `most_bytes` of lines."""
    for _, lines in _last_files(folder, tier, most_bytes):
        yield from parse_lines(lines)


class HistoryTail:
    """The log of a run that another process keeps: `past` once, then `more` again and again.

    Only the last megabytes of each tier are read, so that a run of a month opens as fast as one of an hour.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0  # of the file that was read last
        self._offset = 0  # how far

    def past(self) -> list[Sample]:
        """Read the run so far, oldest first, each part at the finest grain near its end."""
        samples: list[Sample] = []
        for grain in GRAINS:
            files = _last_files(self.folder, grain.name, MOST_BYTES)
            if files and grain.name == RAW:
                self._number, self._offset = files[-1][0], len(files[-1][1])
            start_s = samples[0].start_s if samples else float("inf")
            found = (sample for _, lines in files for sample in parse_lines(lines))
            samples = [sample for sample in found if sample.time_s <= start_s] + samples
        return samples

    def again(self) -> HistoryTail:
        """Return another reader of the same log."""
        return HistoryTail(self.folder)

    def recent(self) -> list[Sample]:
        """Read the end of the last file: some minutes."""
        with contextlib.suppress(OSError, ValueError):
            number, path = max(segments(self.folder, RAW).items())
            whole = _whole_lines(path)
            if whole is not None:
                self._number, self._offset = number, len(whole)
                return list(parse_lines(whole[-RECENT_BYTES:]))  # half a line is skipped
        return []

    def more(self) -> list[Sample]:
        """Read what was appended since; nothing if the folder is gone."""
        samples: list[Sample] = []
        with contextlib.suppress(OSError):
            for number, path in segments(self.folder, RAW).items():
                if number < self._number:
                    continue
                start = self._offset if number == self._number else 0
                whole = _whole_lines(path, start=start)
                if whole is None:
                    break  # compressed at this moment: it is there again next time, under its other name
                samples += parse_lines(whole)
                self._number, self._offset = number, start + len(whole)
        return samples


def _last_files(folder: Path, tier: str, most_bytes: int) -> list[tuple[int, bytes]]:
    """Return (number, whole lines) of the last files of a tier, oldest first; none if the folder is gone."""
    found: list[tuple[int, bytes]] = []
    size = 0
    with contextlib.suppress(OSError):
        for number, path in reversed(segments(folder, tier).items()):
            if size >= most_bytes:
                break
            whole = _whole_lines(path)
            if whole is not None:
                found.append((number, whole))
                size += len(whole)
    return found[::-1]


def _whole_lines(path: Path, *, start: int = 0) -> bytes | None:
    """Read a file up to its last whole line; None if it cannot be read."""
    try:
        if path.suffix == ".gz":
            data = read_regular(path, most_bytes=LARGEST_FILE)
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(LARGEST_FILE + 1)
        else:
            data = read_regular(path, most_bytes=LARGEST_FILE, start=start)
    except (OSError, EOFError, zlib.error):
        return None
    if len(data) > LARGEST_FILE:  # compressed, a few kilobytes can hold gigabytes
        return None
    data = data[start:] if path.suffix == ".gz" else data
    return data[: data.rfind(b"\n") + 1]


def parse_lines(lines: bytes) -> Iterator[Sample]:
    """Parse samples; skip damaged lines."""
    for line in lines.splitlines():
        with contextlib.suppress(ValueError, BadInput, RecursionError, OverflowError):
            sample = Sample.from_json(json.loads(line))
            if abs(sample.start_s) < LATEST_S and abs(sample.time_s) < LATEST_S:
                yield sample
