"""Run a script for so many optimizer steps and write down when each of them ended.

    python clocked.py OUT.json WARMUP STEPS script.py ARGS…

The script knows nothing of it: torch calls a hook after every optimizer's step.  Of several optimizers the
first that steps counts; of several ranks the first writes.  On a GPU the clock is read behind everything that
was launched, once after the warm-up and once at the end, because a read after every step would slow the job.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from flatout.ground.script.main import after_import, run_as_main


def main() -> None:
    out, num_warmup, num_steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ends: list[float] = []
    first: list[int] = []

    def watch(torch: object) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(after_step)

    def after_step(optimizer: object, *_: object) -> None:
        import torch

        first[:] = first or [id(optimizer)]
        if id(optimizer) != first[0]:
            return
        if len(ends) in (num_warmup, num_warmup + num_steps) and torch.cuda.is_available():
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        if len(ends) > num_warmup + num_steps:
            if os.environ.get("RANK", "0") == "0":
                out.write_text(json.dumps(ends[num_warmup:]))
            raise SystemExit(0)

    after_import("torch", watch)
    sys.orig_argv = [sys.executable, "-c", "", ""]
    run_as_main(sys.argv[4:], module=False, at_start=sys.modules)


if __name__ == "__main__":
    main()
