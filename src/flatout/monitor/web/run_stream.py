"""One run as all its browsers see it: each thing to be sent is encoded once, and shared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flatout.monitor.sample import Sample
from flatout.monitor.verdicts.verdict import verdicts
from flatout.monitor.verdicts.window import Verdict
from flatout.monitor.web.events import event, history_json, sample_document
from flatout.monitor.web.thinning import Past

VERDICT_EVERY_S = 5.0  # a sentence stays for long enough to be read
OVERLAP_S = 30.0  # another run's log may be that late


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a browser has got: the number of samples there were, and the time of the last."""

    count: int
    time_s: float | None


class Stream:
    """The samples of one run, and their events."""

    def __init__(self, key: str, samples: Iterable[Sample] = ()) -> None:
        self.key = key
        self.latest: Sample | None = None
        self._past = Past()
        self._count = 0
        self._verdicts: tuple[Verdict, ...] = ()
        self._judged_s: float | None = None
        self._event: bytes | None = None
        self._whole: bytes | None = None
        self.extend(samples)

    def extend(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._past.add(sample)
            self.latest = sample
            self._count += 1
            self._event = self._whole = None

    @property
    def position(self) -> Position:
        return Position(count=self._count, time_s=None if self.latest is None else self.latest.time_s)

    def since(self, position: Position | None) -> bytes:
        """What a browser at `position` has not seen: nothing, the last sample, or what it missed."""
        if position is None:
            return self.whole()
        if self.latest is None or position.count == self._count:
            return b""
        if position.count == self._count - 1:
            return self._sample_event(self.latest)
        if position.time_s is None or position.time_s >= self.latest.time_s:
            return self.whole()
        return self._history(self._past.after(position.time_s), is_whole=False, time_s=self.latest.time_s)

    def whole(self) -> bytes:
        """Everything, without an id: a browser that loses the connection before the rest asks for all."""
        if self._whole is None:
            self._whole = self._history(self._past.samples, is_whole=True)
        return self._whole

    def again(self, time_s: float) -> bytes:
        """For a browser that was here before, perhaps with another server, up to about `time_s`."""
        return self._history(self._past.after(time_s - OVERLAP_S), is_whole=False)

    def _sample_event(self, sample: Sample) -> bytes:
        if self._event is None:
            document = sample_document(sample, run=self.key, verdicts=self._judged())
            self._event = event("sample", document, time_s=sample.time_s)
        return self._event

    def _history(self, samples: Sequence[Sample], *, is_whole: bool, time_s: float | None = None) -> bytes:
        if self.latest is None:
            latest: dict[str, object] = {"run": self.key, "sample": None, "verdicts": []}
        else:
            latest = sample_document(self.latest, run=self.key, verdicts=self._judged())
        return event("history", history_json(samples, is_whole=is_whole, latest=latest), time_s=time_s)

    def _judged(self) -> tuple[Verdict, ...]:
        assert self.latest is not None
        now_s = self.latest.time_s
        if self._judged_s is None or not 0.0 <= now_s - self._judged_s < VERDICT_EVERY_S:
            self._verdicts, self._judged_s = verdicts(self._past.samples), now_s
        return self._verdicts
