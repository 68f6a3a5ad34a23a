"""The lengths of a data set's sequences, and of its batches: the longest decides.

A batch is padded to its longest row.  If rows are drawn at random, a batch of `b` rows stays within a length
with the b-th power of one row's probability, so large batches are nearly always long, whatever the mean says.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.ground.codec import encode
from flatout.ground.errors import BadInput
from flatout.ground.units import show_share
from flatout.planner.config.settings import Setting, Settings

FORMATS = "one length per line, lines of 'length,count', or JSON: [12, 40] or {\"12\": 3}"
SHARES = (0.5, 0.9, 0.99)  # of batches
LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLengths:
    """Batches of one size: how long a share of them stays, and how many reach the longest."""

    batch_size: int
    within: Mapping[str, int]  # "50 %" -> the length that this share of batches stays within
    longest_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceLengths:
    """A histogram: length -> how many sequences have it."""

    source: str
    counts: Mapping[int, int]

    @property
    def num_sequences(self) -> int:
        return sum(self.counts.values())

    @property
    def longest(self) -> int:
        from flatout.memory.predict.largest_batch import longest

        return longest(self.counts)

    def of_batches(self, batch_size: int) -> BatchLengths:
        """Return how long batches of `batch_size` random rows are."""
        lengths = sorted(length for length, count in self.counts.items() if count)
        total = self.num_sequences
        shares, seen = [], 0
        for length in lengths:
            seen += self.counts[length]
            shares.append((seen / total) ** batch_size)
        shares[-1] = 1.0
        within = {show_share(share): lengths[bisect.bisect_left(shares, share)] for share in SHARES}
        below = shares[-2] if len(shares) > 1 else 0.0
        return BatchLengths(batch_size=batch_size, within=within, longest_share=1.0 - below)

    def to_json(self, batch_sizes: Iterable[int]) -> dict[str, Any]:
        return {
            "source": self.source,
            "num_sequences": self.num_sequences,
            "longest": self.longest,
            "batches": [encode(self.of_batches(size)) for size in dict.fromkeys(batch_sizes)],
        }


def with_lengths(settings: Settings, lengths: SequenceLengths, *, job_sizes: Mapping[str, int]) -> Settings:
    """Return settings whose length is the longest sequence, unless a stage cuts it."""
    if LENGTH not in job_sizes:
        raise BadInput(
            f"--lengths {lengths.source}: the job has no size {LENGTH!r}",
            hint=f"its sizes are {', '.join(job_sizes)}",
        )
    stages = []
    for stage in settings.stages:
        configured = stage.sizes.get(LENGTH)
        source = f"the longest of {lengths.num_sequences:,} in {lengths.source}"
        value = lengths.longest
        if configured is not None and configured.value < value:
            value, source = configured.value, f"{source}, cut at {configured.source}"
        sizes = {**stage.sizes, LENGTH: Setting(value=value, source=source)}
        stages.append(dataclasses.replace(stage, sizes=sizes))
    return dataclasses.replace(settings, stages=tuple(stages))


def read_lengths(path: Path) -> SequenceLengths:
    """Read a file of lengths, with or without counts."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"--lengths {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"--lengths {path} is not text", hint=f"give {FORMATS}") from None
    counts: Counter[int] = Counter()
    for length, count, where in _json(text, path) if text.lstrip()[:1] in ("[", "{") else _lines(text, path):
        if length < 1 or count < 0:
            raise BadInput(
                f"{where}: length {length} occurs {count} times",
                hint="lengths are at least 1, counts at least 0",
            )
        counts[length] += count
    if not any(counts.values()):
        raise BadInput(f"--lengths {path} holds no sequence", hint=f"give {FORMATS}")
    return SequenceLengths(source=path.name, counts=dict(counts))


def _lines(text: str, path: Path) -> Iterator[tuple[int, int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.split(r"[\s,;]+", line.partition("#")[0].strip())
        where = f"{path}, line {number}"
        if words == [""]:
            continue
        if number == 1 and not any(re.fullmatch(r"-?\d+", word) for word in words):
            continue  # the names of the columns
        if len(words) > 2 or not all(re.fullmatch(r"-?\d+", word) for word in words):
            raise BadInput(f"{where}: {line.strip()[:40]!r} is not a length", hint=f"give {FORMATS}")
        yield int(words[0]), int(words[1]) if len(words) == 2 else 1, where


def _json(text: str, path: Path) -> Iterator[tuple[int, int, str]]:
    try:
        found: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"--lengths {path} is not valid JSON: line {error.lineno}: {error.msg}") from None
    items = found.items() if isinstance(found, dict) else ((length, 1) for length in found)
    for length, count in items:
        whole = re.fullmatch(r"-?\d+", str(length)) and type(count) is int and type(length) is not bool
        if not whole:
            raise BadInput(f"{path}: {length!r}: {count!r} is not a length", hint=f"give {FORMATS}")
        yield int(length), count, str(path)
