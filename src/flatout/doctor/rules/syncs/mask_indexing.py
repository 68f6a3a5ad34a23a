"""FO226 mask-indexing

What it does
Finds a line that selects rows by a mask many times per step, waiting for the GPU each time.

Why it costs
The number of rows in `x[mask]` is known only when the GPU has counted them, so the host waits for all
queued work, again for each mask. A loop over experts, classes or layers pays this once per iteration.

Evidence
On a GPU, one line indexes with a mask, or calls `nonzero`, `masked_select` or `unique`, at least 4 times
per step, and the profiler saw the GPU idle for at least 5 % of the step in gaps that follow a wait. The
ceiling is measured: steps without the block that contains the line.

Fix
Keep the shape and mask the result, or sort once and split by counts that are read once:

```diff
-loss = loss_of_each[mask].mean()
+loss = (loss_of_each * mask).sum() / mask.sum()
-for i, layer in enumerate(layers):
-    out[expert == i] = layer(x[expert == i])
+order = expert.argsort(stable=True)
+sizes = torch.bincount(expert, minlength=num_experts).tolist()
+out[order] = torch.cat([layer(rows) for rows, layer in zip(x[order].split(sizes), layers)])
```

Fix safety
Reordered: the same rows, summed in another order.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import show_calls, show_ops
from flatout.doctor.rule import title_of
from flatout.doctor.rules.waits.sync_in_step import gaps_after_waits, waiting_lines
from flatout.measure.evidence import Evidence, Site

ARMS = ("knock-out",)
RULE = title_of(__doc__, arms=ARMS)
EXPLAINS = ("FO202",)
MASKS = ("__getitem__", "__setitem__", "masked_select", "nonzero", "unique")
LEAST_CALLS = 4


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for line, share in waiting_lines(evidence, _is_masked, least_calls=LEAST_CALLS):
        message = (
            f"rows are picked by a mask {show_calls(line.calls_per_step)} times per step here "
            f"({show_ops(line)}), and each waits for the GPU"
        )
        figures = (gaps_after_waits(evidence),)
        findings += RULE.proven(evidence, line.place, message, figures=figures, share=share)
    return findings


def _is_masked(site: Site) -> bool:
    return site.via is None and site.op in MASKS
