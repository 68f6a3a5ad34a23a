"""The log of a run that another process keeps: its end first, then whatever is appended.

Only the last megabytes of each tier are read, so that a run of a month opens as fast as one of an hour.
"""

from __future__ import annotations

from pathlib import Path

from flatout.monitor.past.history import GRAINS, MIB, NAME, parse_lines, segments, whole_lines
from flatout.monitor.sample import Sample

MOST_BYTES = 2 * MIB  # of the lines of one tier
RAW = GRAINS[0].name


class RunLog:
    """One run's folder; `past` once, then `more` again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0  # of the file that was read last
        self._offset = 0  # how far

    def past(self) -> list[Sample]:
        """The run so far, each part at the finest grain that is near its end, oldest first."""
        samples: list[Sample] = []
        for grain in GRAINS:
            lines = _last_lines(self.folder, grain.name)
            if grain.name == RAW:
                self._begin_behind(lines)
            found = [sample for _, whole in lines for sample in parse_lines(whole)]
            start_s = samples[0].time_s - (samples[0].span_s or 0.0) if samples else float("inf")
            samples = [sample for sample in found if sample.time_s <= start_s] + samples
        return samples

    def _begin_behind(self, lines: list[tuple[int, bytes]]) -> None:
        if lines:
            self._number, last = lines[-1]
            self._offset = len(last)

    def more(self) -> list[Sample]:
        """What was appended since; nothing where the folder is gone."""
        samples: list[Sample] = []
        for path in _files(self.folder, RAW):
            number = _number_of(path)
            if number < self._number:
                continue
            whole = whole_lines(path)
            if whole is None:
                break  # compressed at this moment: it is there again next time, under its other name
            start = self._offset if number == self._number else 0
            samples += parse_lines(whole[start:])
            self._number, self._offset = number, len(whole)
        return samples


def _files(folder: Path, tier: str) -> list[Path]:
    try:
        return segments(folder, tier)
    except OSError:
        return []


def _number_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match["number"])


def _last_lines(folder: Path, tier: str) -> list[tuple[int, bytes]]:
    """(number, whole lines) of the last files of a tier, oldest first."""
    found: list[tuple[int, bytes]] = []
    size = 0
    for path in reversed(_files(folder, tier)):
        if size >= MOST_BYTES:
            break
        whole = whole_lines(path)
        if whole is not None:
            found.append((_number_of(path), whole))
            size += len(whole)
    return found[::-1]
