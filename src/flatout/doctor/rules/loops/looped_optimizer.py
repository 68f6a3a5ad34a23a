"""FO307 looped-optimizer

What it does
Finds an optimizer that is set to update its parameters one by one, in a Python loop.

Why it costs
Adam makes a dozen calls for each tensor, and each call takes microseconds, however small the tensor is.
With lists (`foreach=True`) it makes a dozen calls for all of them together; fused (`fused=True`), it makes
one.

Evidence
One of torch's optimizers was created with `foreach=False`, updates at least 8 tensors and takes at least 5
% of the step. The ceiling is measured: steps with a fused update, or with lists if this optimizer has no
fused one. On a CPU, torch loops by default, which this rule leaves alone; `flatout tune` tries `fused=True`
there.

Fix
```diff
-optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
+optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
```

Fix safety
Reordered: the same formula in another order of operations, which may round differently.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import costly_optimizers, optimizer_time
from flatout.doctor.rule import title_of
from flatout.ground.units import show_share
from flatout.measure.evidence import Evidence

ARMS = ("fused-optimizer", "foreach-optimizer")
RULE = title_of(__doc__, arms=ARMS)
TUNE = ("fused-optimizer", "foreach-optimizer")
CAN_FUSE = ("Adam", "AdamW", "SGD", "Adagrad")
FEWEST_TENSORS = 8


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for setup, share in costly_optimizers(evidence):
        if setup.way != "for-loop" or setup.num_tensors < FEWEST_TENSORS:
            continue
        findings += RULE.proven(
            evidence,
            setup.place,
            f"{setup.name} updates {setup.num_tensors} tensors one by one, {show_share(share)} of the step",
            figures=(
                optimizer_time(evidence, share),
                f"{setup.num_tensors} tensors in {setup.num_groups} groups",
            ),
            share=share,
            fix=f"{setup.name}(..., {'fused' if setup.name in CAN_FUSE else 'foreach'}=True)",
        )
    return findings
