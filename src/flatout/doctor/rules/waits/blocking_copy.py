"""FO206 blocking-copy

What it does
Finds copies of page-locked batches to the GPU that the host waits for. The line is the one that copies, such
as `batch.to(device)` without `non_blocking=True`.

Why it costs
The loader has already placed the batch where the copy engine can read it by itself, but the host waits
anyway: it launches nothing meanwhile, and the GPU runs dry after the copy.

Evidence
On a GPU: a line copies at least 1 MiB per step from page-locked memory without `non_blocking=True`, and the
profiler saw such copies take at least 3 % of the step. Copy time is divided among such lines by their
bytes. The ceiling is measured: steps whose copies the host does not wait for.

Fix
Give this copy `non_blocking=True`:

```diff
-batch = batch.to(device)
+batch = batch.to(device, non_blocking=True)
```

Fix safety
Exact: the stream orders the copy before the kernels that read it. Do not write into the batch on the host
before the step has ended.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import copied_lines
from flatout.doctor.rule import title_of
from flatout.ground.units import show_bytes, show_seconds, show_share
from flatout.measure.evidence import Evidence

ARMS = ("staged",)
RULE = title_of(__doc__, arms=ARMS)
LEAST_BYTES = 1024 * 1024
LEAST_SHARE = 0.03


def detect(evidence: Evidence) -> list[Finding]:
    findings: list[Finding] = []
    waits = copied_lines(
        evidence, "HtoD pinned", lambda site: site.pinned is True and site.blocking is True, least=LEAST_SHARE
    )
    for line, share, copies_s in waits:
        if line.bytes_per_step >= LEAST_BYTES:
            findings += RULE.proven(
                evidence,
                line.place,
                f"the host waits while {show_bytes(line.bytes_per_step)} per step are copied to the GPU, "
                f"{show_share(share)} of the step",
                figures=(
                    f"{show_bytes(line.bytes_per_step)} per step copied on this line, page-locked already",
                    f"page-locked copies to the GPU take {show_seconds(copies_s)} per step in the profile",
                ),
                share=share,
            )
    return findings
