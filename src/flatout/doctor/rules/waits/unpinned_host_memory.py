"""FO201 unpinned-host-memory

What it does
Finds batches that are copied to the GPU from ordinary, pageable memory. The reported line is the one that
copies, such as `batch.to(device)`.

Why it costs
The GPU's copy engine can only read page-locked memory. The driver therefore copies pageable data piece by
piece through its own small page-locked buffer, at a fraction of the bus's bandwidth. The call returns only
when that is done, even with `non_blocking=True`, so the copy can never overlap with computation.

Evidence
On a GPU: a line copies at least 1 MiB per step from memory that is not page-locked, and the profiler saw
pageable host-to-device copies take at least 3 % of the step. Copy time is divided among such lines by their
bytes. The ceiling is measured: steps whose batches are already in page-locked memory.

Fix
Let the loader place batches in page-locked memory, and do not wait for the copy:

```diff
-loader = DataLoader(dataset, batch_size=256, num_workers=4)
+loader = DataLoader(dataset, batch_size=256, num_workers=4, pin_memory=True)
-batch = batch.to(device)
+batch = batch.to(device, non_blocking=True)
```

Do not call `.pin_memory()` in the training loop: locking pages there takes longer than the copy.

Fix safety
Exact: the same bytes arrive, and the stream orders the copy before the kernels that read it. The host
cannot swap page-locked memory out.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import CodeLine, copied_lines
from flatout.doctor.loading import loader_arguments, made_by
from flatout.doctor.rule import title_of
from flatout.ground.units import show_bytes, show_seconds, show_share
from flatout.measure.evidence import Evidence

ARMS = ("staged",)
RULE = title_of(__doc__, arms=ARMS)
TUNE = ("device-prefetch", "pinned-memory", "pinned-copies")
LEAST_BYTES = 1024 * 1024
LEAST_SHARE = 0.03


def detect(evidence: Evidence) -> list[Finding]:
    findings: list[Finding] = []
    pageable = copied_lines(evidence, "HtoD pageable", lambda site: site.pinned is False, least=LEAST_SHARE)
    for line, share, copies_s in pageable:
        if line.bytes_per_step >= LEAST_BYTES:
            findings += _finding(evidence, line, copies_s=copies_s, share=share)
    return findings


def _finding(evidence: Evidence, line: CodeLine, *, copies_s: float, share: float) -> list[Finding]:
    return RULE.proven(
        evidence,
        line.place,
        f"{show_bytes(line.bytes_per_step)} per step are copied to the GPU from pageable memory, "
        f"{show_share(share)} of the step",
        figures=(
            f"{show_bytes(line.bytes_per_step)} per step copied on this line, none of it page-locked",
            f"pageable host-to-device copies take {show_seconds(copies_s)} per step in the profile",
        ),
        share=share,
        fix=_fix(evidence),
    )


def _fix(evidence: Evidence) -> str:
    unpinned = [loader for loader in evidence.loaders if loader.trains and not loader.pin_memory]
    if not unpinned:
        return (
            "this tensor does not come from a pinned loader: keep it on the GPU, or copy it through one "
            "page-locked buffer that is allocated once"
        )
    if made_by(unpinned[0]):
        return loader_arguments(unpinned[0], pin_memory=True)
    place = unpinned[0].place
    where = f" at {place}" if place is not None else ""
    return f"give the DataLoader{where} pin_memory=True, and this copy non_blocking=True"
