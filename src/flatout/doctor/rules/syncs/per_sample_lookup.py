"""FO221 per-sample-lookup

What it does
Finds a line that looks up each sample of a batch with a separate search.

Why it costs
`[(table == value).nonzero().item() for value in batch]` compares the whole table with one value, lists the
matches and reads the first, once per sample. On a GPU every `nonzero` and every `item` waits for all queued
work. Dozens of diffusion examples look up their time steps like this.

Evidence
One line calls `nonzero` or `argwhere` and reads a number at least 8 times per step, and it holds at least 3
% of the step. The ceiling is measured: steps without the block that contains the line.

Fix
Look up all samples at once: `torch.searchsorted`, or an index table built once.

```diff
-index = torch.tensor([(timesteps == t).nonzero().item() for t in batch])
+index = torch.searchsorted(timesteps, batch)      # timesteps in rising order
+index = place_of[batch]                           # or: place_of[timesteps] = torch.arange(len(timesteps))
```

Fix safety
Exact: the same indices.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import direct_lines, line_share, show_calls, show_timing
from flatout.doctor.rule import title_of
from flatout.ground.units import show_share
from flatout.measure.evidence import Evidence

ARMS = ("knock-out",)
RULE = title_of(__doc__, arms=ARMS)
EXPLAINS = ("FO202", "FO301", "FO302")
SEARCHES, READS = ("nonzero", "argwhere"), ("item", "tolist", "__int__", "__index__")
LEAST_CALLS = 8
LEAST_SHARE = 0.03


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for line in direct_lines(evidence, "sync"):
        here = [site for site in evidence.sites if site.place == line.place and site.via is None]
        searches, reads = (
            sum(site.calls_per_step for site in here if site.op in ops) for ops in (SEARCHES, READS)
        )
        calls = min(searches, reads)
        share = line_share(evidence, line)
        if calls < LEAST_CALLS or share is None or share < LEAST_SHARE:
            continue
        findings += RULE.proven(
            evidence,
            line.place,
            f"a table is searched {show_calls(calls)} times per step here, once for each sample: "
            f"{show_share(share)} of the step",
            figures=(
                f"nonzero: {show_calls(calls)} calls per step from this line",
                show_timing(evidence, line),
            ),
            share=share,
        )
    return findings
