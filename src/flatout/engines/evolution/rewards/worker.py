"""The process that calls a reward: it receives chunks of rows and sends scores.

Which row is under way, and since when, is in memory shared with the pool: when a reward hangs or ends its
process, the pool knows which row it was.  Scores are sent together, but at least every `SEND_EVERY_S`: few
messages, and few rows to score again after a death.

The process leads its own process group: an interrupt typed at the terminal reaches only the run itself,
and ending the group also ends whatever the reward started.  It ends with the run, even one that was killed.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Literal

from flatout.engines.evolution.rewards.kinds import AnsweredRow, NotOnePerRow, Reward, RewardOfRows
from flatout.ground.user_code import place_of

FailureKind = Literal["raised", "invalid", "timeout", "died"]
SEND_EVERY_S = 0.05
LONGEST_MESSAGE = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A row that got no score, and why."""

    index: int
    kind: FailureKind
    message: str

    def __str__(self) -> str:
        return f"row {self.index} {self.kind}: {self.message}"


def score_row(reward: Reward, row: AnsweredRow, *, index: int) -> float | Failure | None:
    """Call a reward once; return a finite number, None if it is not for this row, or why it failed."""
    try:
        value = reward(*row)
    except NotOnePerRow as error:
        return Failure(index=index, kind="invalid", message=str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001  a reward can raise anything, and costs its row
        return Failure(index=index, kind="raised", message=_described(error))
    return _checked(value, index=index)


def _checked(value: object, *, index: int) -> float | Failure | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return Failure(index=index, kind="invalid", message=f"{str(value)[:60]!r} is not a number")
    if math.isfinite(number):
        return number
    return Failure(index=index, kind="invalid", message=f"{number} is not finite")


def _described(error: BaseException) -> str:
    """Return type, message and place of what a reward raised, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_MESSAGE]
    return f"{text} ({place_of(error)})"


def serve(pipe: Connection, under_way: Any) -> None:
    """Run a worker: receive the reward, then chunks until the pipe closes.

    `under_way` is shared with the pool: when the row under way began, on the clock of `time.monotonic` that
    all processes of a machine share, and which row of the chunk it is.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.dup2(2, 1)  # stdout is for the results of the run, not for what a reward prints
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    try:
        reward = pipe.recv()
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001  importing the reward's module can raise anything
        pipe.send(("broken", _described(error)))
        return
    pipe.send(("ready", None))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            rows, together = pipe.recv()
            under_way[:] = time.monotonic(), 0
            scores = _scored_together(reward, rows) if together else None
            if scores is not None:
                pipe.send(("scores", scores))
            else:
                pipe.send(("apart", None))
                _score_one_by_one(reward, rows, pipe, under_way)


def _scored_together(reward: Reward, rows: list[AnsweredRow]) -> list[float | Failure | None] | None:
    """Score all rows in one call; None if it fails: calls for single rows then find the culprit."""
    if not isinstance(reward, RewardOfRows):
        return None
    try:
        values = list(reward.score_rows(rows))
    except NotOnePerRow as error:  # row by row it may return one for one, and be wrong all the same
        return [Failure(index=index, kind="invalid", message=str(error)) for index in range(len(rows))]
    except (Exception, SystemExit):  # noqa: BLE001  the same rows are about to be scored one by one, and say it themselves
        return None
    if len(values) != len(rows):
        return None
    return [_checked(value, index=index) for index, value in enumerate(values)]


def _score_one_by_one(reward: Reward, rows: list[AnsweredRow], pipe: Connection, under_way: Any) -> None:
    scores: list[float | Failure | None] = []
    sent_s = time.monotonic()
    for index, row in enumerate(rows):
        began_s = time.monotonic()
        under_way[:] = began_s, index
        scores.append(score_row(reward, row, index=index))
        if began_s - sent_s > SEND_EVERY_S:
            pipe.send(("scores", scores))
            scores, sent_s = [], began_s
    pipe.send(("scores", scores))


def _end_with_the_run() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)
