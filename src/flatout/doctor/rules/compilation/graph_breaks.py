"""FO602 graph-breaks

What it does
Finds lines at which torch.compile has to end its graph and return to Python. Functions of
`torch.jit.script`, prints, clocks and values read back are the usual causes.

Why it costs
Each break splits one graph in two: kernels are not fused across it, tensors are written out and read again,
guards are checked for each part, and CUDA graphs end there. A break inside a loop over layers is paid for
every layer.

Evidence
Dynamo's own records give the line and the reason of each break in your code. Breaks that every job has, at
`.backward()` and inside the optimizers, are left out. There is no finding if the model, its loss and its
backward pass hold less than 10 % of the step: a step that waits for its loader waits just as long for one
graph. There is no ceiling: nothing can be changed inside a compiled function while it runs.

Fix
Move this line out of the compiled function, or write it with tensor operations:

```diff
-if x.abs().max() > limit:
-    x = x / 2
+x = torch.where(x.abs().amax() > limit, x / 2, x)
-losses.append(loss.item())
+losses.append(loss.detach())                        # and .item() outside the compiled function
```

`TORCH_LOGS=graph_breaks` shows every break with its stack, and `fullgraph=True` makes them errors.

Fix safety
Exact, as long as the moved code does the same.
"""

from __future__ import annotations

from itertools import groupby

from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.doctor.sentences import phase_shares
from flatout.measure.evidence import Evidence, GraphBreak

RULE = title_of(__doc__)
EXPLAINS = ("FO603",)
MOST_REASONS = 3
COMPILED, LEAST_SHARE = ("forward", "backward", "rest"), 0.10  # of the step, in phases that a graph can hold


def detect(evidence: Evidence) -> list[Finding]:
    shares = phase_shares(evidence)
    held = sum(shares.get(phase, 0.0) for phase in COMPILED)
    if evidence.compilation is None or (shares and held < LEAST_SHARE):
        return []
    by_line = sorted(evidence.compilation.breaks, key=lambda found: found.place.at)
    return [_finding(list(found)) for _, found in groupby(by_line, key=lambda found: found.place.at)]


def _finding(breaks: list[GraphBreak]) -> Finding:
    most = max(breaks, key=lambda each: each.times)
    return RULE.finding(
        most.place,
        f"a compiled graph ends here: {most.reason}",
        figures=[f"{each.reason} ({each.times} compilations)" for each in breaks[:MOST_REASONS]],
        no_ceiling="nothing can be changed inside a compiled function while it runs",
    )
