"""The process that calls a reward: one chunk of rows in, scores out.

Scores go into a `Board`, memory shared with the pool, together with the row under way and when it began.
So a chunk costs two messages however many rows it has, and when a reward hangs or takes its process down,
the pool knows which row it was and keeps the scores of the rows before it.

The process leads its own process group: an interrupt typed at the terminal reaches only the run itself,
and ending the group also ends whatever the reward started.  It ends with the run, even one that was killed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Literal

from flatout.engines.evolution.rewards.kinds import Reward, RewardOfRows, Row

MOST_ROWS = 256  # of a chunk
NOT_BEGUN = -1.0
FailureKind = Literal["raised", "invalid", "timeout", "died"]

_BEGAN_S, _ROW, _CALL_ROWS, _FIRST_SCORE = 0, 1, 2, 3
_LONGEST_MESSAGE = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A row that got no score, and why."""

    index: int
    kind: FailureKind
    message: str

    def __str__(self) -> str:
        return f"row {self.index} {self.kind}: {self.message}"


class Board:
    """What pool and worker both see of the chunk under way: clock, row, rows in this call, scores.

    The clock is `time.monotonic`, which all processes of a machine share.
    """

    def __init__(self, cells: Any) -> None:
        self._cells = cells

    @classmethod
    def cells(cls, context: Any) -> Any:
        """Shared memory for one board; it travels to the worker, a `Board` does not."""
        return context.RawArray("d", _FIRST_SCORE + MOST_ROWS)

    def clear(self) -> None:
        """Before a chunk is handed over: nothing has begun."""
        self._cells[_BEGAN_S], self._cells[_ROW], self._cells[_CALL_ROWS] = time.monotonic(), NOT_BEGUN, 1.0

    def begin(self, row: int, *, call_rows: int = 1) -> None:
        self._cells[_BEGAN_S], self._cells[_CALL_ROWS], self._cells[_ROW] = time.monotonic(), call_rows, row

    def set_score(self, row: int, score: float) -> None:
        self._cells[_FIRST_SCORE + row] = score

    @property
    def began_s(self) -> float:
        return float(self._cells[_BEGAN_S])

    @property
    def row(self) -> int | None:
        """The row under way; None before the first."""
        row = self._cells[_ROW]
        return None if row == NOT_BEGUN else int(row)

    @property
    def call_rows(self) -> int:
        return int(self._cells[_CALL_ROWS])

    def scores(self, num_rows: int) -> list[float | None]:
        """The first scores; None for a row that failed."""
        values = self._cells[_FIRST_SCORE : _FIRST_SCORE + num_rows]
        return [None if math.isnan(value) else value for value in values]


def score_row(reward: Reward, row: Row, *, index: int) -> float | Failure:
    """One call of a reward: a finite number, or the reason why there is none."""
    try:
        value = reward(*row)
    except Exception as error:  # noqa: BLE001  a reward can raise anything, and costs its row alone
        return Failure(index=index, kind="raised", message=_described(error))
    return _checked(value, index=index)


def _checked(value: object, *, index: int) -> float | Failure:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return Failure(index=index, kind="invalid", message=f"{str(value)[:60]!r} is not a number")
    if math.isfinite(number):
        return number
    return Failure(index=index, kind="invalid", message=f"{number} is not finite")


def _described(error: Exception) -> str:
    """Type, message and place of what a reward raised, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_MESSAGE]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def serve(pipe: Connection, cells: Any) -> None:
    """The worker's life: the reward comes first, then chunks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.dup2(2, 1)  # results of the run own the standard output; what a reward prints is not among them
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    board = Board(cells)
    try:
        reward = pipe.recv()
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001  importing the reward's module can raise anything
        pipe.send(("broken", _described(error)))
        return
    pipe.send(("ready",))
    try:
        while (chunk := pipe.recv()) is not None:
            rows, together = chunk
            if not (together and _score_together(reward, rows, board)):
                _score_one_by_one(reward, rows, board, pipe)
            pipe.send(("done",))
    except (EOFError, BrokenPipeError):
        return


def _score_together(reward: Reward, rows: list[Row], board: Board) -> bool:
    """Whether one call scored every row; where it did not, calls for single rows find the culprit."""
    if not isinstance(reward, RewardOfRows):
        return False
    board.begin(0, call_rows=len(rows))
    try:
        values: Sequence[float] = reward.score_rows(rows)
    except Exception:  # noqa: BLE001  the same rows are about to be scored one by one, and say it themselves
        return False
    if len(values) != len(rows) or not all(map(math.isfinite, values)):
        return False
    for row, value in enumerate(values):
        board.set_score(row, value)
    return True


def _score_one_by_one(reward: Reward, rows: list[Row], board: Board, pipe: Connection) -> None:
    for index, row in enumerate(rows):
        board.begin(index)
        score = score_row(reward, row, index=index)
        if isinstance(score, Failure):
            board.set_score(index, math.nan)
            pipe.send(("failed", score))
        else:
            board.set_score(index, score)


def _end_with_the_run() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)
