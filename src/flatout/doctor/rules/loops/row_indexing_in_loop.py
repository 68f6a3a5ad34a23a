"""FO302 row-indexing-in-loop

What it does
Finds a line that reads or writes a tensor row by row. `x[i]`, `x[b, t]` or `x[i] = row` in a loop touches
many rows per step.

Why it costs
Each row is a separate operator call. If gradients flow through `x`, each call also has a backward that
builds a gradient of the size of the **whole** of `x`, zero except for one row, and adds it to the others: N
rows of an N-row tensor cost N² memory traffic. In one in-context RL job on an H200 (batch 512) the step
took 8.9 s with rows indexed in a loop and 0.0216 s with one gather.

Evidence
One line of the job itself indexes at least 10 rows per step, and these calls, with the backward nodes they
create, hold at least 3 % of the step. Indexing inside libraries does not count, nor does what a dataset or
a collate function reads for each sample. The ceiling is measured: steps without the block that contains the
line, forward and backward, plus what the device needs at its best for the block's arithmetic and bytes.

Fix
Index or gather all rows at once; if a loop must stay, unbind the tensor before it:

```diff
-rows = torch.stack([x[b, last[b]] for b in range(batch)])
+rows = x[torch.arange(batch, device=x.device), last]
+rows = torch.gather(x, 1, index)                       # or any rows, in any order, with one backward
```

Rows that a loop writes come from one list or array as well:

```diff
-for i, word in enumerate(words):
-    ids[i] = vocabulary[word]
+ids = torch.tensor([vocabulary[word] for word in words])
```

If a loop must stay, `x.unbind(0)` creates all rows at once, with one backward for all of them.

Fix safety
Reordered if gradients flow: they are summed in another order, which can change their last bits. Exact
otherwise.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import CodeLine, calls_and_timing, costly_lines, direct_lines, show_calls
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence

ARMS = ("knock-out",)
RULE = title_of(__doc__, arms=ARMS)
TUNE = ("one-gather", "rows-at-once", "unbound-rows")
WRITE = "__setitem__"
LEAST_CALLS = 10
LEAST_SHARE = 0.03


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    lines = direct_lines(evidence, "row")
    for line, share in costly_lines(evidence, lines, least_calls=LEAST_CALLS, least_share=LEAST_SHARE):
        findings += _finding(evidence, line, share=share)
    return findings


def suits(evidence: Evidence, finding: Finding, _name: str) -> bool:
    """Return whether a line reads rows: the patches leave rows that are written alone."""
    return any(
        line.place == finding.place and set(line.ops) != {WRITE} for line in direct_lines(evidence, "row")
    )


def _finding(evidence: Evidence, line: CodeLine, *, share: float) -> list[Finding]:
    calls = show_calls(line.calls_per_step)
    whose = (
        ", each with a gradient as large as the whole tensor"
        if line.requires_grad and line.backward_s
        else ""
    )
    are_written = set(line.ops) == {WRITE}
    figures = calls_and_timing(evidence, line)
    if line.backward_s is not None:
        figures.append(f"{show_seconds(line.backward_s)} of it in the backward of these rows")
    return RULE.proven(
        evidence,
        line.place,
        f"{calls} rows are {'written' if are_written else 'indexed'} here per step, one by one{whose}: "
        f"{show_share(share)} of the step",
        figures=figures,
        share=share,
        fix="write all rows at once, from one list, array or index" if are_written else None,
        safety="reordered" if line.requires_grad else "exact",
    )
