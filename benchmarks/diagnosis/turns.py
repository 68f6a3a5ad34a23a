"""Run a training script as `python SCRIPT` would, but let another process say when it may take steps.

    python turns.py SCRIPT ARGUMENTS...

Two jobs that take turns of a second each meet the same machine; two that run one after the other can differ
by 40 %.  After a step, the script waits for a line on stdin: `go SECONDS` lets it take steps for that long,
and is answered on stdout by the seconds, the number of steps and the length of each; `end` ends it.  What the
script prints goes to stderr.  A script that ends before it is told to begins again, and the time until its
next step is nobody's.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any, TextIO


class Turns:
    """Takes steps while it is this job's turn."""

    def __init__(self, answers: TextIO, requests: TextIO) -> None:
        self.answers, self.requests = answers, requests
        self.pid = os.getpid()
        self.ended_s: float | None = None  # when the script ended, until its next step
        self.apart_s = 0.0  # between an end and the next step, in all
        self.num_steps = 0
        self.began_s, self.lasts_s = 0.0, -1.0
        self.ends_s: list[float] = []

    def step_end(self, *_unused: Any) -> None:
        if os.getpid() != self.pid:
            return
        self.num_steps += 1
        if os.environ.get("RANK", "0") != "0":
            return  # it waits for the first one anyway
        if self.ended_s is not None:
            self.apart_s += time.perf_counter() - self.ended_s
            self.ended_s = None
            return
        if self.lasts_s >= 0:
            self.ends_s.append(self._now())
            if self.ends_s[-1] - self.began_s < self.lasts_s:
                return
            _wait_for_gpu()
            took_s = self._now() - self.began_s
            lengths = [
                end - begin
                for begin, end in zip([self.began_s, *self.ends_s], [*self.ends_s, 0.0], strict=True)
            ]
            answer = {"seconds": took_s, "steps": len(self.ends_s), "each_s": lengths[:-1]}
            self.answers.write(json.dumps(answer) + "\n")
        else:
            self.answers.write("ready\n")
        self.answers.flush()
        word, _, seconds = self.requests.readline().strip().partition(" ")
        if word != "go":
            os._exit(0)
        self.lasts_s, self.ends_s = float(seconds), []
        self.began_s = self._now()

    def script_end(self) -> None:
        """The script begins again, and takes steps for the turn that it was in."""
        self.ended_s = time.perf_counter()

    def _now(self) -> float:
        return time.perf_counter() - self.apart_s


def _wait_for_gpu() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    turns = Turns(answers, sys.stdin)
    register_optimizer_step_post_hook(turns.step_end)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    seen = -1
    while turns.num_steps > seen:  # else it ended without a step
        seen = turns.num_steps
        runpy.run_path(script, run_name="__main__")
        turns.script_end()


if __name__ == "__main__":
    main()
