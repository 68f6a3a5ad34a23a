"""FO224 synchronize-in-loop

What it does
Finds a call of `torch.cuda.synchronize()` that the training loop makes in every step.

Why it costs
The host normally runs ahead of the GPU and queues kernels for it. This call drains the queue: when it
returns, the GPU has nothing to run and idles until the host has launched the next kernels.

Evidence
On a GPU, a line of your code calls it at least once per step. The ceiling is measured: steps in which the
call does nothing.

Fix
Remove `torch.cuda.synchronize()` from the loop; time with events. Read them later:

```diff
-torch.cuda.synchronize()
-start = time.perf_counter()
+start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
+start.record()
 train_step()
-torch.cuda.synchronize()
-seconds = time.perf_counter() - start
+end.record()        # start.elapsed_time(end), some steps later
```

Fix safety
Exact: the numbers stay the same.
"""

from __future__ import annotations

from flatout.doctor.lines import repeated_call
from flatout.doctor.rule import title_of

ARMS = ("no-synchronize", "knock-out")
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True
TUNE = ("no-debug-calls", "dropped-calls")

detect = repeated_call(RULE, "synchronize", what="waits until the GPU has nothing left to do")
