"""The samples of a run, the older the coarser: what a chart can show, and no more memory than that.

The last ten minutes stay as they were sampled.  What lies before is merged into slots of equal length, some
hundreds for the whole run however long it gets; a week is drawn as well by 500 points as by 600,000.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from flatout.monitor.sample import Sample, merge

RECENT_S = 600.0
MOST_RECENT = 900  # ten samples a second: a minute and a half
MOST_OLDER = 500
SLACK = 100  # samples between two mergers


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
        """Those later than `time_s`."""
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
    """At most `most` samples for all of these, each for an equal part of the time."""
    if len(samples) <= most:
        return list(samples)
    first_s, span_s = samples[0].time_s, samples[-1].time_s - samples[0].time_s

    def slot(sample: Sample) -> int:
        return min(int((sample.time_s - first_s) / span_s * most), most - 1)

    return [merge(list(group)) for _, group in itertools.groupby(samples, key=slot)]
