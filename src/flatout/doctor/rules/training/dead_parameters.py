"""FO902 dead-parameters

What it does
Finds parameters that an optimizer updates but that never get a gradient. The reported line is the `forward`
of your module that holds them.

Why it costs
They are not trained: `forward` forgot a layer, a branch is behind a `detach`, or no loss reads a head. They
take memory, and in a job of several ranks the exchange of gradients waits for them, or fails.

Evidence
They had no gradient in any of at least eight steps, although they require one (`requires_grad`) and other
parameters of the same optimizer got theirs. Frozen parameters are not dead. Parameters that are used once
in many steps, such as an expert that is rarely chosen, may have had no gradient in the observed steps: the
finding says how many those were.

Fix
Use them in `forward`, or freeze them and leave them out of the optimizer:

```diff
-optimizer = torch.optim.AdamW(model.parameters())
+for parameter in model.pooler.parameters():
+    parameter.requires_grad_(False)
+optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
```

Fix safety
Lossy if they begin to train; exact if they are frozen.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence, Untrained

RULE = title_of(__doc__)
ARMS = ()
FEWEST_STEPS = 8


def detect(evidence: Evidence) -> list[Finding]:
    untrained = evidence.training.untrained if evidence.training is not None else ()
    return [_finding(each) for each in untrained if each.num_steps >= FEWEST_STEPS and each.num]


def _finding(untrained: Untrained) -> Finding:
    more = f" and {untrained.num - len(untrained.names)} more" if untrained.num > len(untrained.names) else ""
    parameters = "parameter" if untrained.num == 1 else "parameters"
    return RULE.finding(
        untrained.place,
        f"{untrained.num} {parameters} of {untrained.module} never got a gradient",
        figures=(f"in {untrained.num_steps} steps: {', '.join(untrained.names)}{more}",),
    )
