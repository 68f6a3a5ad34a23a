"""FO224 synchronize-in-loop

What it does
Finds a call of `torch.cuda.synchronize()` that the training loop makes in every step.

Why it costs
The host normally runs ahead of the GPU and queues kernels for it. This call drains the queue: when it returns
the GPU has nothing to run, and idles until the host has launched the next kernels.

Evidence
On a GPU, a line of the user's calls it at least once per step. The ceiling is measured: steps in which the
call does nothing.

Fix
Remove the call. To time a step, record events and read them later:

```python
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record()
train_step()
end.record()        # start.elapsed_time(end), some steps later
```

Fix safety
Exact: the numbers stay the same.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import repeated_call
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence

RULE = title_of(__doc__)
ARMS = ("no-synchronize", "knock-out")
NEEDS_PROOF = True
TUNE = ("no-debug-calls", "dropped-calls")


def detect(evidence: Evidence) -> list[Finding]:
    return repeated_call(
        RULE,
        evidence,
        "synchronize",
        arms=ARMS,
        what="waits until the GPU has nothing left to do",
        fix="remove torch.cuda.synchronize() from the loop; time with events",
    )
