"""Rewards for a whole population, in parallel processes that may fail.

A population gives thousands of completions at once, and while they are scored the GPU waits.  Rewards that
promise to be cheap are called on the spot: a process costs more than they do.  All others go in chunks to a
few worker processes that live as long as the pool (see `worker`).

A reward is a user's code on a model's odd output: it may raise, hang, or end its process.  That costs the row
it happened on: no score, and a `Failure` that says why.  A worker that hangs past the time limit, or dies, is
replaced, and the other rows continue.  The time limit is for one call: a reward that scores rows together
gets that much for every row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import signal
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from typing import Any

from flatout.engines.evolution.rewards.kinds import AnsweredRow, Reward, RewardOfRows, is_cheap
from flatout.engines.evolution.rewards.worker import Failure, FailureKind, score_row, serve
from flatout.ground.errors import BadInput, ChildDied

MOST_ROWS = 256  # of a chunk
NOT_BEGUN = -1
CHUNKS_PER_WORKER = 8  # of one list of rows: enough that nobody waits for the slowest chunk
START_LIMIT_S = 600.0  # for a worker to import its reward, which may load a model, on a busy machine
MOST_FALSE_STARTS = 3  # in a row, before the remaining rows fail


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScores:
    """A score per row, None without one, and those of them that failed, in the order of their rows."""

    values: tuple[float | None, ...]
    failures: tuple[Failure, ...]

    @classmethod
    def of(cls, scores: Sequence[float | Failure | None]) -> RewardScores:
        """Separate scores from failures, in the order of their rows."""
        return cls(
            values=tuple(None if isinstance(score, Failure) else score for score in scores),
            failures=tuple(score for score in scores if isinstance(score, Failure)),
        )

    @property
    def mean(self) -> float | None:
        """The mean over the rows that have a reward; None without any."""
        known = [value for value in self.values if value is not None]
        return sum(known) / len(known) if known else None

    def summary(self) -> str | None:
        """Say in one line what failed; None if nothing did."""
        if not self.failures:
            return None
        kinds = Counter(failure.kind for failure in self.failures)
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        return f"{len(self.failures)} of {len(self.values)} rewards failed ({counted}); {self.failures[0]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Rows of one list that a worker gets at once; `together`: in one call."""

    rows: range
    together: bool


class _Worker:
    """One process and this end of its pipe."""

    def __init__(self, reward: Reward) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self._under_way = context.RawArray("d", 2)  # when the row under way began, and which it is
        arguments = (there, self._under_way)
        self.process = context.Process(target=serve, args=arguments, daemon=True, name="reward")
        self.process.start()
        there.close()
        self.ready = False
        self.chunk: _Chunk | None = None
        self.num_scored = 0
        self._given_s = time.monotonic()
        self._owner = os.getpid()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: the pool reads that
            self.pipe.send(reward)

    def give(self, chunk: _Chunk, rows: Sequence[AnsweredRow]) -> None:
        self.chunk, self.num_scored, self._given_s = chunk, 0, time.monotonic()
        self._under_way[:] = self._given_s, NOT_BEGUN
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(([rows[row] for row in chunk.rows], chunk.together))

    @property
    def row(self) -> int | None:
        """The row of its chunk that is under way; None before the first."""
        row = int(self._under_way[1])
        return None if self.chunk is None or row == NOT_BEGUN else row

    def deadline_s(self, timeout_s: float) -> float:
        """Return when to give up on this worker, on the clock of `time.monotonic`."""
        if self.ready and self.chunk is None:
            return math.inf
        if self.chunk is None or self.row is None:
            return self._given_s + START_LIMIT_S
        began_s: float = self._under_way[0]
        return began_s + timeout_s * (len(self.chunk.rows) if self.chunk.together else 1)

    def end(self) -> list[tuple[Any, ...]]:
        """Kill the process and all it started; return the messages it left behind."""
        if os.getpid() != self._owner:  # a fork of the run, which has the handle and not the process
            return []
        try:
            if self.process.pid is None or not self.ready:
                raise ProcessLookupError  # it may not lead a group of its own yet
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        self.process.join()
        messages = []
        with contextlib.suppress(EOFError, OSError):  # the last message may be torn
            while self.pipe.poll():
                messages.append(self.pipe.recv())
        self.pipe.close()
        return messages


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


def _check_travels(reward: Reward) -> None:
    """Raise BadInput for a reward that cannot be sent to another process."""
    try:
        ForkingPickler.dumps(reward)
    except (PicklingError, AttributeError, TypeError) as error:
        raise BadInput(
            f"the reward cannot be sent to another process: {error}",
            hint="define it at the top of a module and give it as package.module:function",
        ) from error


class RewardPool:
    """Calls `reward` for many rows; a context manager that leaves no process behind.

    One thread at a time may use it.
    """

    def __init__(self, reward: Reward, *, workers: int, timeout_s: float) -> None:
        if workers < 1:
            raise BadInput(f"workers={workers} cannot score anything", hint="give at least 1")
        if not timeout_s > 0:
            raise BadInput(f"timeout_s={timeout_s} leaves no time for a reward", hint="give seconds above 0")
        if not is_cheap(reward):
            _check_travels(reward)
        self.reward = reward
        self.timeout_s = timeout_s
        self._num_workers = workers
        self._workers: list[_Worker] = []
        self._has_worked = False
        self._end = weakref.finalize(self, _end_all, self._workers)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process; the pool starts others when it is used again."""
        _end_all(self._workers)

    def start(self) -> None:
        """Start the processes ahead of the first rows; otherwise `score` does it."""
        while not is_cheap(self.reward) and len(self._workers) < self._num_workers:
            self._workers.append(_Worker(self.reward))

    def score(self, rows: Iterable[AnsweredRow]) -> RewardScores:
        """Score every row; failures are in the result, and only an interrupt or a broken set-up raises."""
        rows = list(rows)
        if is_cheap(self.reward):
            return RewardScores.of(
                [score_row(self.reward, row, index=index) for index, row in enumerate(rows)]
            )
        scoring = _Scoring(
            rows, num_workers=self._num_workers, together=isinstance(self.reward, RewardOfRows)
        )
        try:
            while not scoring.is_finished:
                self.start()
                self._advance(scoring)
        except BaseException:
            self.close()  # nobody waits for the chunks under way
            raise
        return scoring.scores()

    def _advance(self, scoring: _Scoring) -> None:
        """Hand out pending chunks, wait for the next event, and act on it."""
        for worker in self._workers:
            if worker.ready and worker.chunk is None and scoring.pending:
                worker.give(scoring.pending.popleft(), scoring.rows)
        deadline_s = min(worker.deadline_s(self.timeout_s) for worker in self._workers)
        # A worker moves its own deadline when it begins a row, so no wait is longer than the shortest limit.
        patience_s = min(self.timeout_s, max(0.0, deadline_s - time.monotonic()))
        heard = connection.wait([worker.pipe for worker in self._workers], timeout=patience_s)
        for worker in [worker for worker in self._workers if worker.pipe in heard]:
            self._listen(worker, scoring)
        for worker in list(self._workers):
            if worker.deadline_s(self.timeout_s) <= time.monotonic() and not worker.pipe.poll():
                begun = worker.row is not None
                why = (
                    f"no score after {self.timeout_s:g} s"
                    if begun
                    else f"no answer within {START_LIMIT_S:g} s"
                )
                self._lose(worker, scoring, kind="timeout", why=why)

    def _listen(self, worker: _Worker, scoring: _Scoring) -> None:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            connection.wait([worker.process.sentinel], timeout=1)  # so that its own exit code is seen
            self._lose(worker, scoring, kind="died", why="its process ended")
            return
        if message[0] == "broken":
            self._lose(worker, scoring, kind="died", why=str(message[1]))
        else:
            self._take(worker, scoring, *message)

    def _take(self, worker: _Worker, scoring: _Scoring, message: str, content: Any) -> None:
        """Act on what a worker says of its chunk."""
        if message == "ready":
            worker.ready = self._has_worked = True
        elif message == "apart" and worker.chunk is not None:
            worker.chunk = dataclasses.replace(worker.chunk, together=False)
        elif message == "scores" and worker.chunk is not None:
            for score in content:
                scoring.settle(worker.chunk.rows[worker.num_scored], score)
                worker.num_scored += 1
            if worker.num_scored == len(worker.chunk.rows):
                worker.chunk = None

    def _lose(self, worker: _Worker, scoring: _Scoring, *, kind: FailureKind, why: str) -> None:
        """End a worker: rows with a score keep it, the row under way fails, the others continue."""
        row = worker.row
        for message in worker.end():
            self._take(worker, scoring, *message)
        self._workers.remove(worker)
        chunk = worker.chunk
        if chunk is None and worker.ready:
            return  # it had nothing to do, or has just finished
        if kind == "died" and worker.ready:
            why = f"{why} with code {worker.process.exitcode}"
        if chunk is None or worker.row is None:
            if chunk is not None:
                scoring.pending.appendleft(chunk)
            self._false_start(scoring, why=why)
            return
        left = [chunk.rows[worker.num_scored :]]
        # A row that began after the limit of the previous one had passed is not to blame.
        if not chunk.together and (kind == "died" or worker.row == row):
            blamed = chunk.rows[worker.row]
            scoring.settle(blamed, Failure(index=blamed, kind=kind, message=why))
            left = [chunk.rows[worker.num_scored : worker.row], chunk.rows[worker.row + 1 :]]
        for rows in filter(None, reversed(left)):
            scoring.pending.appendleft(_Chunk(rows=rows, together=False))

    def _false_start(self, scoring: _Scoring, *, why: str) -> None:
        if not self._has_worked:
            raise ChildDied(
                f"the process for the reward did not start: {why}",
                hint="create the RewardPool under if __name__ == '__main__'",
            )
        scoring.num_false_starts += 1
        if scoring.num_false_starts >= MOST_FALSE_STARTS:
            scoring.give_up(why=f"no process for the reward would start: {why}")


class _Scoring:
    """The progress of one list of rows: chunks to hand out, and scores that came back."""

    def __init__(self, rows: list[AnsweredRow], *, num_workers: int, together: bool) -> None:
        self.rows = rows
        size = max(1, min(MOST_ROWS, math.ceil(len(rows) / (num_workers * CHUNKS_PER_WORKER))))
        whole = range(len(rows))
        self.pending = deque(
            _Chunk(rows=whole[start : start + size], together=together) for start in whole[::size]
        )
        self.num_false_starts = 0
        self._scores: dict[int, float | Failure | None] = {}

    @property
    def is_finished(self) -> bool:
        return len(self._scores) == len(self.rows)

    def settle(self, row: int, score: float | Failure | None) -> None:
        """Record a row's score, that it has none, or why it failed."""
        self._scores[row] = dataclasses.replace(score, index=row) if isinstance(score, Failure) else score
        self.num_false_starts = 0

    def give_up(self, *, why: str) -> None:
        """Fail every row that no worker has."""
        for chunk in self.pending:
            for row in chunk.rows:
                self.settle(row, Failure(index=row, kind="died", message=why))
        self.pending.clear()

    def scores(self) -> RewardScores:
        return RewardScores.of([self._scores[row] for row in range(len(self.rows))])
