"""FO405 grad-enabled-inference

What it does
Finds a model call that records gradients which nothing uses.

Why it costs
A teacher, a target network or an evaluation that runs without `torch.no_grad()` keeps every activation for
a backward pass. If its output goes into the loss, that pass even happens: gradients of a model that no
optimizer trains are computed in full and thrown away.

Evidence
A line calls a model with gradients on, on inputs that need none, and either no optimizer has the model's
parameters, or no backward pass reached its result. The call holds at least 3 % of the step. The ceiling is
measured: steps in which this call runs under `torch.no_grad()`. Without a measured gain nothing is said: a
forward pass computes the same without a record. An evaluation between steps is reported by
evaluation-dominates, and `flatout tune` tries `no_grad` there.

Fix
Call it under `torch.no_grad()`:

```diff
-target = teacher(x)
+with torch.no_grad():
+    target = teacher(x)
```

Fix safety
Exact: the same outputs, and the same gradients for what is trained.
"""

from __future__ import annotations

from flatout.doctor.ceilings import counted_step_s, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence

ARMS = ("no-grad",)
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True
LEAST_SHARE = 0.03


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for call in evidence.module_calls:
        share = share_of(call.host_s, counted_step_s(evidence))
        if not call.unused_gradients or share is None or share < LEAST_SHARE:
            continue
        counted = show_seconds(counted_step_s(evidence))
        findings += RULE.proven(
            evidence,
            call.place,
            f"{call.module} records gradients here that nothing uses, {show_share(share)} of the step in its "
            "forward pass alone",
            figures=(f"{show_seconds(call.host_s)} of a step of {counted} while calls were counted",),
            share=share,
        )
    return findings
