"""FO408 half-without-scaler

What it does
Finds training in float16 without a gradient scaler.

Why it costs
The smallest number in float16 is 6e-8, and many gradients are smaller: they become zero, and the layers
they belong to learn nothing, although the loss still falls a little. The time is lost not in the step but
in a training that has to be run again.

Evidence
A model call in the training step runs under autocast to float16, gradients are computed, and the job has no
enabled `GradScaler`. There is no share and no ceiling: the cost is not time.

Fix
Scale the loss with `torch.amp.GradScaler`, or use bfloat16:

```diff
-loss.backward()
-optimizer.step()
+scaler = torch.amp.GradScaler("cuda")           # once, before the loop
+scaler.scale(loss).backward()
+scaler.step(optimizer)
+scaler.update()
```

On Ampere and later GPUs, bfloat16 has the range of float32 and needs no scaler: `torch.autocast("cuda",
dtype=torch.bfloat16)`.

Fix safety
Lossy: gradients that were lost come back, so training changes.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence

RULE = title_of(__doc__)


def detect(evidence: Evidence) -> list[Finding]:
    precision = evidence.precision
    if precision is None or precision.scales_loss is not False:
        return []
    trains = any(step.num_backwards for step in evidence.kept("real"))
    calls = [call for call in evidence.module_calls if call.training and call.autocast == "float16"]
    if not trains or not calls:
        return []
    longest = max(calls, key=lambda call: call.host_s or 0.0)
    return [
        RULE.finding(
            longest.place,
            f"{longest.module} trains in float16 without a gradient scaler: small gradients become zero",
            figures=("autocast to float16 around this call, and no enabled GradScaler",),
        )
    ]
