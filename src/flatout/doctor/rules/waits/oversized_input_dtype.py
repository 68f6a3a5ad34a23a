"""FO209 oversized-input-dtype

What it does
Finds batches of 64-bit floats that are copied to the GPU for a model of 32 or 16 bits. NumPy makes 64-bit
floats by default, and `torch.from_numpy` keeps them.

Why it costs
Half of the bytes, or more, are discarded after the copy, but the bus, the workers' queues and the
page-locked memory carry them all. If nothing narrows them, the GPU computes in 64 bits, at a fraction of
its speed.

Evidence
On a GPU: a line copies at least 1 MiB of 64-bit floats per step, the optimizer has no 64-bit parameters,
and the profiler saw copies to the GPU take at least 3 % of the step. That time is divided among lines by
their bytes, and narrower numbers save half of a line's share. The ceiling is measured: steps whose batches
are already on the GPU; it never exceeds that share. Integers are left alone, because only the job knows
what range they need; so are 32-bit images that were once bytes.

Fix
Make them 32-bit floats where they are created (`astype(np.float32)`, `.float()`):

```diff
-features = torch.from_numpy(features)                       # float64, as NumPy makes it
+features = torch.from_numpy(features.astype(np.float32))
```

Fix safety
Reordered: numbers are rounded earlier; a 32-bit model rounds them anyway.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import copied_lines
from flatout.doctor.rule import title_of
from flatout.ground.units import show_bytes, show_share
from flatout.measure.evidence import Evidence

ARMS = ("staged-on-device",)
RULE = title_of(__doc__, arms=ARMS)
LEAST_BYTES = 1024 * 1024
LEAST_SHARE = 0.03
SAVED = 0.5  # of the bytes of 64-bit floats


def detect(evidence: Evidence) -> list[Finding]:
    dtypes = evidence.precision.parameter_dtypes if evidence.precision is not None else ()
    if not dtypes or "float64" in dtypes:
        return []
    findings: list[Finding] = []
    for line, held, _copies_s in copied_lines(evidence, "HtoD", lambda site: True, least=LEAST_SHARE):
        num_bytes = sum(
            site.wide_bytes_per_step or 0.0 for site in evidence.sites if site.place.at == line.place.at
        )
        if num_bytes < LEAST_BYTES:
            continue
        share = held * SAVED * min(1.0, num_bytes / line.bytes_per_step)
        findings += RULE.proven(
            evidence,
            line.place,
            f"{show_bytes(num_bytes)} of 64-bit floats per step are copied to the GPU of a narrower model",
            figures=(f"narrower numbers save {show_share(share)} of the step",),
            share=share,
            observed_share=share,
        )
    return findings
