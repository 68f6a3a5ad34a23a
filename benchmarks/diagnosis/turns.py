"""Run a training script as `python SCRIPT` would, but let another process say when it may take steps.

    python turns.py SCRIPT ARGUMENTS...

Two jobs that take turns of a second each meet the same machine; two that run one after the other can differ
by 40 %.  After a step, the script waits for a line on stdin: `go SECONDS` lets it take steps for that long,
and is answered on stdout by the seconds, the number of steps and the length of each; `end` ends it.  What the
script prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any


class Turns:
    """Takes steps while it is this job's turn."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.pid = os.getpid()
        self.began_s, self.lasts_s = 0.0, -1.0
        self.ends_s: list[float] = []

    def step_end(self, *_unused: Any) -> None:
        if os.getpid() != self.pid or os.environ.get("RANK", "0") != "0":
            return  # a process of its own, or a rank that waits for the first one anyway
        if self.lasts_s >= 0:
            self.ends_s.append(time.perf_counter())
            if self.ends_s[-1] - self.began_s < self.lasts_s:
                return
            _wait_for_gpu()
            took_s = time.perf_counter() - self.began_s
            lengths = [
                end - begin
                for begin, end in zip([self.began_s, *self.ends_s], [*self.ends_s, 0.0], strict=True)
            ]
            answer = {"seconds": took_s, "steps": len(self.ends_s), "each_s": lengths[:-1]}
            self.answers.write(json.dumps(answer) + "\n")
        else:
            self.answers.write("ready\n")
        self.answers.flush()
        word, _, seconds = sys.stdin.readline().strip().partition(" ")
        if word != "go":
            os._exit(0)
        self.lasts_s, self.ends_s = float(seconds), []
        self.began_s = time.perf_counter()


def _wait_for_gpu() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(Turns().step_end)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
