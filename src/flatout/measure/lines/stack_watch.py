"""Where the training thread is over the whole run: a sample of its stack some twenty times a second.

An evaluation, a rollout or a checkpoint comes once in many steps, so a pass of a few steps misses it.  This
sampling runs from the start of the job to the end of the observation, at a cost far below 1 % of the job.
Each sample carries the time since the previous one, and how late it came: a call that never releases the
interpreter's lock delays the sample, by up to 5 ms.  If that call is over by then, the sample finds the line
that came after it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Literal, NamedTuple

from flatout.measure.clock import EXCLUDED, FORWARD, now
from flatout.measure.evidence import Place
from flatout.measure.lines.stacks import DEEPEST, stack_of
from flatout.measure.process.own_thread import OwnThread

if TYPE_CHECKING:
    from flatout.measure.clock import Clock
    from flatout.measure.user_code import UserCode

INTERVAL_S = 0.04
MOST_LOOKS = 20_000  # beyond this, every other sample is dropped and the rate is halved

Library = Literal["checkpoint", "compilation", "loading"]
SAVES = ("save_pretrained", "save_checkpoint", "_save_checkpoint", "save_state", "state_dict")
SAVING = ("/torch/serialization.py", "/torch/distributed/checkpoint/", "/safetensors/")  # and loading
COMPILING = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/codecache.py")
LOADING = "/torch/utils/data/"


class Look(NamedTuple):
    """The training thread's stack at one moment."""

    time_s: float
    weight_s: float  # since the previous sample
    places: tuple[Place, ...]  # the user's lines, outermost first
    callee: str | None  # the library's function that the innermost of them calls
    library: Library | None  # what libraries were doing
    in_model: bool
    in_loader: int | None = None  # a loader calls the places from this index on
    late_s: float = 0.0  # delay after it was due: another line held the interpreter's lock
    due_earlier: bool = False  # it was due before the thread entered the phase in which it was found


class StackWatch:
    """Samples the training thread from `start` to `stop`."""

    def __init__(
        self, clock: Clock, user_code: UserCode, *, on_look: Callable[[], None] = lambda: None
    ) -> None:
        self._clock, self._user_code, self._on_look = clock, user_code, on_look
        self.started_at_s = now()
        self.looks: list[Look] = []
        self._interval_s = INTERVAL_S
        self._doing: dict[int, tuple[Library | None, CodeType]] = {}  # by id, as in UserCode
        self._uneven = random.Random(0)  # even intervals would beat with the steps
        self._before_s = self.started_at_s
        self._thread = OwnThread(self._look_around, name="flatout-stack-watch")

    def start(self) -> None:
        self.started_at_s = self._before_s = now()
        self._thread.start()

    def stop(self) -> None:
        """Stop without waiting: a sample under way ends by itself."""
        self._thread.stop()

    def _look_around(self, leave: threading.Event) -> None:
        while True:
            interval_s = self._interval_s * self._uneven.uniform(0.5, 1.5)
            due_s = now() + interval_s
            if leave.wait(interval_s):
                return
            late_s = now() - due_s
            try:
                changed_at = self._clock.last
                region, lines = self._clock.stack[-1], stack_of(self._clock.owner)
                time_s = now()
                # if the clock changed between the two, the thread may be in another step by now
                if lines and region != EXCLUDED and self._clock.last == changed_at:
                    look = self._look(lines, region, time_s, time_s - self._before_s)
                    self.looks.append(look._replace(late_s=late_s, due_earlier=changed_at > due_s))
                self._before_s = time_s
                if len(self.looks) >= MOST_LOOKS:
                    self._thin_out()
                self._on_look()
            except Exception:  # noqa: BLE001 - ours; the job goes on without this instrument
                return

    def _thin_out(self) -> None:
        self.looks = [look._replace(weight_s=2 * look.weight_s) for look in self.looks[::2]]
        self._interval_s *= 2

    def _look(
        self, lines: Sequence[tuple[CodeType, int]], region: int, time_s: float, weight_s: float
    ) -> Look:
        places: list[Place] = []
        callee: str | None = None
        library: Library | None = None
        called: str | None = None
        inside: int | None = None  # places that the loader calls
        for code, line in lines:
            if self._user_code.is_user(code):
                if not places:
                    callee = called
                places.append(self._user_code.place_in(code, line=line))
            elif self._user_code.is_library(code):
                called = code.co_name
                does = self._does(code)
                library = library or does
                inside = len(places) if does == "loading" else inside
        outside = None if inside is None else len(places) - inside
        kept = tuple(places[::-1][:DEEPEST])
        return Look(time_s, weight_s, kept, callee, library, region == FORWARD, outside)

    def _does(self, code: CodeType) -> Library | None:
        known = self._doing.get(id(code))
        if known is None:
            known = self._doing[id(code)] = (what_it_does(code), code)
        return known[0]


def what_it_does(code: CodeType) -> Library | None:
    """Return what a library function is for, if that distinguishes kinds of stalls."""
    path = code.co_filename.replace("\\", "/")
    if any(part in path for part in COMPILING):
        return "compilation"
    if code.co_name in SAVES or ("save" in code.co_name and any(part in path for part in SAVING)):
        return "checkpoint"
    return "loading" if LOADING in path else None
