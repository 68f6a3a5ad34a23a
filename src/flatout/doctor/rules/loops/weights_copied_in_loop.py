"""FO310 weights-copied-in-loop

What it does
Finds a line that overwrites many parameters of a model in every step.

Why it costs
`model.load_state_dict(...)` and `parameter.copy_(...)` copy every weight, one call per tensor. In a loop
over adapters, members or tasks, the whole model is copied for each of them: memory traffic the size of the
model, and calls that grow with its depth.

Evidence
One line copies into at least 10 parameters per step, inside `load_state_dict` or directly, and holds at
least 3 % of the step. The ceiling is measured: steps without the block that contains the line.

Fix
Call the model with the other weights (`torch.func.functional_call`), without copying them:

```diff
-model.load_state_dict(variant)
-outputs = model(x)
+outputs = torch.func.functional_call(model, variant, (x,))       # no copy
```

Update a target network every hundredth step, or with one call for all tensors:
`torch._foreach_lerp_(targets, parameters, 0.005)`. For many adapters on one base, see `flatout adapt`.

Fix safety
Exact: the same weights are used. Less frequent updates of a target network change the training.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import calls_and_timing, costly_lines, lines_of, show_calls
from flatout.doctor.rule import title_of
from flatout.ground.units import show_bytes, show_share
from flatout.measure.evidence import Evidence

ARMS = ("knock-out",)
RULE = title_of(__doc__, arms=ARMS)
LEAST_CALLS = 10
LEAST_SHARE = 0.03


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    lines = lines_of([site for site in evidence.sites if site.kind == "weights"])
    for line, share in costly_lines(evidence, lines, least_calls=LEAST_CALLS, least_share=LEAST_SHARE):
        calls = show_calls(line.calls_per_step)
        message = (
            f"{calls} parameters are overwritten here per step, {show_bytes(line.bytes_per_step)}: "
            f"{show_share(share)} of the step"
        )
        figures = calls_and_timing(evidence, line)
        findings += RULE.proven(evidence, line.place, message, figures=figures, share=share)
    return findings
