"""FO306 many-parameter-groups

What it does
Finds an optimizer with many parameter groups that have the same options.

Why it costs
Each group is updated by separate calls, however small it is: one group per tensor takes the optimizer back
to one tensor at a time, although it could update lists of them. One detection model had 465 groups with 28
different sets of options; merging them took 23 % off its step.

Evidence
One of torch's optimizers has at least 8 more groups than different sets of options, and takes at least 5 %
of the step. The ceiling is measured: steps in which groups with equal options are updated as one.

Fix
Merge parameters with the same options into one group:

```diff
-groups = [{"params": [p], "lr": rate_of(name), "weight_decay": decay_of(p)} for name, p in named]
-optimizer = torch.optim.AdamW(groups)
+groups = {}
+for name, p in named:
+    groups.setdefault((rate_of(name), decay_of(p)), []).append(p)
+optimizer = torch.optim.AdamW(
+    [{"params": each, "lr": rate, "weight_decay": decay} for (rate, decay), each in groups.items()]
+)
```

Fix safety
Exact: every parameter is updated by the same formula with the same options. The state of a saved optimizer
depends on the number of groups, so it no longer loads.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import costly_optimizers, optimizer_time
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence

ARMS = ("merged-groups",)
RULE = title_of(__doc__, arms=ARMS)
TUNE = ("merged-groups",)
FEWEST_SAVED = 8


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for setup, share in costly_optimizers(evidence):
        if setup.way is None or setup.num_groups - setup.num_distinct < FEWEST_SAVED:
            continue
        findings += RULE.proven(
            evidence,
            setup.place,
            f"{setup.name} has {setup.num_groups} parameter groups with {setup.num_distinct} different sets "
            "of options",
            figures=(
                f"{setup.num_groups} groups with {setup.num_tensors} tensors, updated group by group",
                optimizer_time(evidence, share),
            ),
            share=share,
        )
    return findings
