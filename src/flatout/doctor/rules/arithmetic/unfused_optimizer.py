"""FO403 unfused-optimizer

What it does
Finds an optimizer on a GPU that updates its parameters in many kernels when one kernel would do.

Why it costs
An update by lists reads and writes every parameter and its state once for each of a dozen operations. The
fused update reads and writes them once. One detector's update fell from 62 to 24 ms.

Evidence
torch's Adam, AdamW, SGD or Adagrad updates lists of tensors on a GPU and takes at least 5 % of the step.
The ceiling is measured: steps with a fused update.

Fix
```diff
-optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
+optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
```

Fix safety
Reordered: the same formula in another order of operations, which may round differently.
"""

from __future__ import annotations

from flatout.doctor.ceilings import on_gpu
from flatout.doctor.finding import Finding, by_argument
from flatout.doctor.lines import costly_optimizers, optimizer_time
from flatout.doctor.rule import title_of
from flatout.doctor.rules.loops.looped_optimizer import CAN_FUSE
from flatout.ground.units import show_share
from flatout.measure.evidence import Evidence

ARMS = ("fused-optimizer",)
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True
TUNE = ("fused-optimizer",)


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for setup, share in costly_optimizers(evidence) if on_gpu(evidence) else ():
        if setup.way != "foreach" or setup.name not in CAN_FUSE:
            continue
        findings += RULE.proven(
            evidence,
            setup.place,
            f"{setup.name} updates its parameters in many kernels, {show_share(share)} of the step",
            figures=(optimizer_time(evidence, share), f"{setup.num_tensors} tensors"),
            share=share,
            fix=by_argument(
                evidence,
                f"{setup.name}(..., fused=True)",
                transformers='TrainingArguments(optim="adamw_torch_fused")'
                if setup.name == "AdamW"
                else None,
            ),
        )
    return findings
