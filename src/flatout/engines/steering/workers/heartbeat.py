"""Which workers of a study are alive, recorded in the study itself.

A worker counts up a number in the study every few seconds.  Whoever wants to take over what it left open
watches that number: while it moves the worker lives, wherever it runs; one that stands still for several
beats is dead.  Only the watcher's own clock is used, so the clocks of machines need not agree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from flatout.ground import OnProgress, ignore

if TYPE_CHECKING:
    import optuna

BEAT_S = 10.0
SILENT_BEATS = 4
ENDED = "ended"
KEY = "beat:"


class Heartbeat:
    """Tells the study that this worker is alive, while the block lasts."""

    def __init__(self, study: optuna.Study, worker: str, *, beat_s: float = BEAT_S) -> None:
        self._study, self._key, self._beat_s = study, KEY + worker, beat_s
        held = study.user_attrs.get(self._key)
        self._count = held if isinstance(held, int) else 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"heartbeat of {worker}")

    def __enter__(self) -> Heartbeat:
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._study.set_user_attr(self._key, ENDED)

    def _run(self) -> None:
        while not self._over.wait(self._beat_s):
            try:
                self._beat()
            except OSError:  # the search writes to the same disk, and says what is wrong with it
                return

    def _beat(self) -> None:
        self._count += 1
        self._study.set_user_attr(self._key, self._count)


def read_beats(study: optuna.Study) -> dict[str, object]:
    """Read the last heartbeat of each worker, by its name."""
    return {key.removeprefix(KEY): beat for key, beat in study.user_attrs.items() if key.startswith(KEY)}


def wait_for_silence(
    study: optuna.Study,
    workers: Iterable[str],
    *,
    known_dead: Collection[str] = (),
    beat_s: float = BEAT_S,
    on_progress: OnProgress = ignore,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str | None:
    """Wait until one of `workers` is dead, ended or silent, and return it; None if there are no workers."""
    waiting = sorted(set(workers))
    if not waiting:
        return None
    began = clock()
    first = {worker: study.user_attrs.get(KEY + worker) for worker in waiting}
    changed_s = dict.fromkeys(waiting, began)
    told = False
    while True:
        asked_s = clock()
        beats = study.user_attrs
        if clock() - asked_s > beat_s:  # a storage that was away says nothing of who wrote to it
            changed_s = dict.fromkeys(waiting, clock())
        for worker in waiting:
            beat = beats.get(KEY + worker)
            if worker in known_dead or beat is None or beat == ENDED:
                return worker
            if beat != first[worker]:
                first[worker], changed_s[worker] = beat, clock()
            elif clock() - changed_s[worker] > SILENT_BEATS * beat_s:
                return worker
        if not told:
            on_progress(f"waiting for {', '.join(waiting)} to finish or fall silent")
            told = True
        pause(beat_s / 2)
