"""FO308 expert-loop

What it does
Finds a loop that calls experts one by one, each with the rows routed to it.

Why it costs
Every expert costs a handful of small products and launches, times experts, times layers, and the same again
in the backward. Selecting its rows by a mask also makes the host wait for the GPU once per expert. If rows
are sorted by expert, all of them go through one grouped product. A rewrite that sorts once made the layer
of one small model 1.2 to 1.5 times as fast, bit for bit.

Evidence
A line inside a loop calls at least 4 modules of one kind with different numbers of rows and holds at least
10 % of the step. The ceiling is measured: steps without the loop, plus what the device needs at its best
for its arithmetic and bytes.

Fix
Sort the rows by expert and multiply all groups in one call:

```diff
-for i in range(num_experts):
-    hidden[expert == i] = x[expert == i] @ self.up[i]        # up: experts x width x hidden
+order = expert.argsort(stable=True)
+ends = torch.bincount(expert, minlength=num_experts).cumsum(0).to(torch.int32)
+hidden = torch._grouped_mm(x[order], self.up, offs=ends)     # its rows are in the order of `order`
```

Without a grouped product, pad each expert to a capacity and use `torch.bmm`.

Fix safety
Reordered: the same products, summed in another order.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import block_share, looks_share, show_calls
from flatout.doctor.rule import title_of
from flatout.ground.units import show_share
from flatout.measure.evidence import Evidence

ARMS = ("knock-out",)
RULE = title_of(__doc__, arms=ARMS)
EXPLAINS = ("FO302", "FO226", "FO202")
FEWEST_EXPERTS = 4
LEAST_SHARE = 0.10


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for calls in evidence.inner_calls:
        if evidence.stacks is None or not evidence.stacks.loops.get(str(calls.place)):
            continue
        share = block_share(evidence, calls.place) or looks_share(evidence, calls.place)
        if (
            not calls.rows_differ
            or calls.num_modules < FEWEST_EXPERTS
            or share is None
            or share < LEAST_SHARE
        ):
            continue
        number = show_calls(calls.calls_per_step)
        findings += RULE.proven(
            evidence,
            calls.place,
            f"{calls.num_modules} modules of the kind {calls.module} are called in turn, each with its own "
            f"rows: {show_share(share)} of the step",
            figures=(f"{number} calls per step, each with another number of rows",),
            share=share,
        )
    return findings
