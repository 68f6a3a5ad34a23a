"""The lines that make batches: stack samples of the process that fetches and collates them.

A worker samples itself while it makes a few early batches, which are never timed; the samples travel with the
batches to the training process.  Without workers, the training thread's own samples tell the same.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from types import CodeType

from flatout.measure.evidence import FetchLine, Place, Stacks
from flatout.measure.lines.stacks import INTERVAL_S, SWITCH_INTERVAL_S, stack_of, wake_on_time
from flatout.measure.user_code import UserCode

FetchCounts = Counter[
    tuple[Place | None, bool, str | None]
]  # a line, whether it collates, the library it calls
ENOUGH_LOOKS = 400
MOST_BATCHES = 60
MOST_LINES = 20


class FetchStacks:
    """Samples the thread that made it while that thread makes a batch."""

    def __init__(self, user_code: UserCode) -> None:
        self._user_code = user_code
        self._owner = threading.get_ident()
        self._found: FetchCounts = Counter()
        self._num_looks = self._num_batches = 0
        self._ended = threading.Event()
        self._busy = threading.Event()
        self._switch_interval_s = sys.getswitchinterval()
        self._border: CodeType | None = None
        self.in_collate = False
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in lines.stacks
        threading.Thread(target=self._look_around, name="flatout-fetch-stacks", daemon=True).start()

    @property
    def is_enough(self) -> bool:
        return self._num_looks >= ENOUGH_LOOKS or self._num_batches >= MOST_BATCHES

    def begin(self) -> None:
        """Start sampling a batch; frames above the caller do not belong to the dataset."""
        self._border = sys._getframe(1).f_code
        self._busy.set()

    def end(self) -> tuple[FetchLine, ...]:
        """Return what was found while the batch was made."""
        self._busy.clear()
        self._num_batches += 1
        found, self._found = self._found, Counter()
        return lines_of(found)

    def stop(self) -> None:
        self._ended.set()
        self._busy.set()
        sys.setswitchinterval(self._switch_interval_s)

    def _look_around(self) -> None:
        wake_on_time()
        uneven = random.Random(0)  # even intervals would beat with the samples
        while not self._ended.wait(INTERVAL_S * uneven.uniform(0.5, 1.5)):
            self._busy.wait()
            found, lines = self._found, stack_of(self._owner)
            if lines and self._busy.is_set():
                self._look(lines, found)

    def _look(self, lines: Sequence[tuple[CodeType, int]], found: FetchCounts) -> None:
        place: Place | None = None
        library: str | None = None
        for code, line in lines:
            if code is self._border:
                break
            if self._user_code.is_user(code):
                place = self._user_code.place_in(code, line=line)
                break
            library = self._user_code.package(code) if self._user_code.is_library(code) else library
        found[place, self.in_collate, library if place is not None else None] += 1
        self._num_looks += 1


def lines_of(found: FetchCounts) -> tuple[FetchLine, ...]:
    """Return lines with their sample counts, most first; None stands for no line of the user's."""
    return tuple(
        FetchLine(place=place, in_collate=in_collate, samples=samples, library=library)
        for (place, in_collate, library), samples in found.most_common(MOST_LINES)
    )


def fetch_lines(stacks: Stacks, *, collate: Place | None) -> tuple[FetchLine, ...]:
    """Return the same lines from samples of a training thread that makes its batches itself.

    Functions that are on the stack in other phases too belong to the training loop, which asks for a batch.
    """
    loop = {_function(place) for path in stacks.paths if path.phase != "wait" for place in path.places}
    found: FetchCounts = Counter()
    for path in stacks.paths:
        if path.phase == "wait":
            inside = [place for place in path.places if _function(place) not in loop]
            in_collate = collate is not None and _function(collate) in map(_function, inside)
            own = (inside[-1], in_collate, path.library) if inside else (None, in_collate, None)
            found[own] += path.samples
    return lines_of(found)


def _function(place: Place) -> tuple[str, str | None]:
    return place.file, place.function
