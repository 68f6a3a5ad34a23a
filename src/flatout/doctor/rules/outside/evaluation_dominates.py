"""FO801 evaluation-dominates

What it does
Finds evaluations that take a tenth of the job or more. They run between training steps, so no step shows
them.

Why it costs
Nothing trains meanwhile. An evaluation of the whole held-out set every few hundred steps easily takes
longer than those steps, and it is often left at small batches, with gradients on, on one process.

Evidence
Steps that take several times the usual are looked into: the training thread's stack, some 25 times a
second over the whole run, names the outermost line that no typical step has on its stack. The share is
of the job's time after set-up, spread over the steps in which it was seen, or over an epoch where it
comes with each. The ceiling is the job with that time for nothing.

Fix
Evaluate less often, or on a fixed part of the set, and let it run as fast as it can:

```python
@torch.inference_mode()
def evaluate(model, loader):        # a batch several times the training one: no gradients are kept
    ...

if step % 5000 == 0:
    evaluate(model, quick_loader)   # a few thousand samples; the whole set at the end of an epoch
```

Fix safety
Lossy: the training stays the same, but the curve has fewer or noisier points, and early stopping follows
it.
"""

from __future__ import annotations

from flatout.doctor.outside import ARMS as ARMS
from flatout.doctor.outside import outside_rule

TUNE = ("no-grad-evaluation",)
detect = outside_rule(
    __doc__,
    "evaluation",
    what="evaluates between training steps",
    fix="evaluate less often or on a part of the set, in larger batches and under torch.inference_mode()",
    safety="lossy",
)
