"""The real gain: two scripts take turns, and the ratio of their steps is taken turn by turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

TURNS = Path(__file__).with_name("turns.py")
LIMIT_S = 300  # a job that hangs is ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Seconds per step of two scripts, and how much faster the second is."""

    slow_s: float
    fast_s: float
    gain: float
    low: float
    high: float
    num_turns: int


class Job:
    """A script that takes steps when told."""

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str] = (),
        *,
        launcher: Sequence[str] = (),
        limit_s: float = LIMIT_S,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(TURNS), script.name, *arguments],
            cwd=script.parent,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._limit = threading.Timer(limit_s, self.process.kill)
        self._limit.daemon = True
        self._limit.start()

    def wait_ready(self) -> None:
        if self._pipe(self.process.stdout).readline() != "ready\n":
            raise RuntimeError(f"{self.process.args}: ended before its first step")

    def turn(self, seconds: float) -> dict[str, Any]:
        pipe = self._pipe(self.process.stdin)
        pipe.write(f"go {seconds}\n")
        pipe.flush()
        answer = self._pipe(self.process.stdout).readline()
        if not answer:
            raise RuntimeError(f"{self.process.args}: ended before its last turn")
        found: dict[str, Any] = json.loads(answer)
        return found

    def end(self) -> None:
        if self.process.poll() is not None:
            return
        self._limit.cancel()
        self._pipe(self.process.stdin).close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def compare(slow: Job, fast: Job, *, turns: int = 6, turn_s: float = 0.6) -> Gain:
    """Alternate turns of both; the first of each warms up."""
    slow.wait_ready()
    fast.wait_ready()
    found = take_turns((slow, fast), turns=turns, turn_s=turn_s)
    slow.end()
    fast.end()
    return gain_between([slow_s for slow_s, _ in found], [fast_s for _, fast_s in found])


def take_turns(jobs: Sequence[Job], *, turns: int, turn_s: float) -> list[tuple[float, ...]]:
    """The seconds per step of each job, turn by turn.

    A turn's figure is its seconds per step, so that a loader's bursts, an epoch's start and an evaluation
    count as they do in the job.
    """
    found = []
    for _ in range(turns + 1):
        answers = [job.turn(turn_s) for job in jobs]
        found.append(tuple(turn["seconds"] / turn["steps"] for turn in answers))
    return found[1:]


def gain_between(slow: Sequence[float], fast: Sequence[float]) -> Gain:
    """The median ratio of turns, with its 95 % bootstrap interval."""
    ratios = np.array(slow) / np.array(fast)
    random = np.random.default_rng(0)
    low, high = np.percentile(np.median(random.choice(ratios, size=(4000, len(ratios))), axis=1), [2.5, 97.5])
    return Gain(
        slow_s=statistics.median(slow),
        fast_s=statistics.median(fast),
        gain=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        num_turns=len(ratios),
    )
