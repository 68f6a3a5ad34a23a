"""FO901 loss-not-finite

What it does
Finds a loss that is infinite or not a number while the job keeps training. The reported line is the one
that calls `backward`.

Why it costs
Every step after it is wasted: the first such gradient turns weights into NaN, and they stay NaN. A job can
run for days like that, at full speed.

Evidence
Flatout looked at the loss in the warm-up steps: it was not finite in at least two of them in a row, up to
the last, and in at least half of all. A job that scales its loss for 16-bit floats skips such steps by
itself while it searches for its scale, and is left alone.

Fix
Find the operation that produces it with `torch.autograd.detect_anomaly`, in a short run:

```diff
-loss.backward()
+with torch.autograd.detect_anomaly():    # until the line is found
+    loss.backward()
```

Usual causes are a logarithm of zero or a division by zero, a learning rate that is too high, and a 16-bit
softmax of a fully masked row.

Fix safety
Lossy: training changes, which is the point.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence

RULE = title_of(__doc__)
ARMS = ()
FEWEST = 2


def detect(evidence: Evidence) -> list[Finding]:
    losses = evidence.training.losses if evidence.training is not None else None
    scaled = evidence.precision is not None and evidence.precision.autocast == "float16"
    if losses is None or scaled or losses.num_not_finite < max(FEWEST, losses.num / 2):
        return []
    return [
        RULE.finding(
            losses.place,
            f"the loss was not finite in the last {losses.num_not_finite} steps of warm-up",
            figures=(f"the loss was read in {losses.num} steps",),
        )
    ]
