"""When training ends before its last step: an adapter that no longer gets better, or a user who says stop.

A signal is only noted; the loop asks at the border of every step, where weights and optimizers agree, keeps a
checkpoint and ends.  A second one ends the process at once.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
from types import FrameType

from flatout.engines.adapters.training.checkpoint import Progress


class StopRequest:
    """SIGINT and SIGTERM as a flag, inside `with`."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True


def after_evaluation(
    progress: Progress, *, score: float, scores: dict[str, float], step: int, patience: int | None
) -> tuple[Progress, bool]:
    """The progress after one more evaluation, and whether its weights are the best so far."""
    if not math.isnan(score) and (progress.best_score is None or score > progress.best_score):
        return Progress(best_score=score, best_step=step, scores=scores), True
    waited = progress.evaluations_without_better + 1
    done = step if patience is not None and waited >= patience else None
    return dataclasses.replace(progress, evaluations_without_better=waited, done=done), False
