"""FO225 anomaly-detection-left-on

What it does
Finds a job that trains with autograd's anomaly detection on.

Why it costs
It keeps a Python stack for every operation of the forward pass and searches every gradient for NaN. This
debugging aid makes steps of many small operations take several times as long, and waits for the GPU at each
check.

Evidence
Anomaly detection was on when a backward pass began. The reported line is the one that turns it on,
including an argument of a framework's trainer. The ceiling is measured: steps with it off.

Fix
Turn anomaly detection off unless you are debugging:

```diff
-torch.autograd.set_detect_anomaly(True)
+torch.autograd.set_detect_anomaly(False)
-trainer = Trainer(detect_anomaly=True)    # Lightning
+trainer = Trainer(detect_anomaly=False)
```

Fix safety
Exact: the numbers stay the same. A NaN is no longer reported at the operation that produces it.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding, by_argument
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence

ARMS = ("no-anomaly-detection",)
RULE = title_of(__doc__, arms=ARMS)
TUNE = ("no-debug-calls", "dropped-calls")


def detect(evidence: Evidence) -> list[Finding]:
    found = next((site for site in evidence.sites if site.op == "detect_anomaly"), None)
    if found is None or found.kind != "call":
        return []
    return RULE.proven(
        evidence,
        found.place,
        "anomaly detection is on: every operation keeps a stack, and every gradient is checked to be finite",
        figures=("on in every backward pass that was counted",),
        fix=by_argument(
            evidence,
            RULE.fix,
            lightning="Trainer(detect_anomaly=False) unless you are debugging",
        ),
    )
