"""FO208 device-round-trip

What it does
Finds lines that bring a tensor from the GPU to the host and send the result back.
`torch.multinomial(p.cpu(), 1).to(device)` is one, and so is a detour over NumPy.

Why it costs
The host waits until the GPU has computed the tensor and does the work itself, then the GPU waits for the
copy back: each stands still for the other. In public reports, this took a fifth of the time in a loop that
generates tokens.

Evidence
On a GPU: one line reads a CUDA tensor (`.cpu()`, `.numpy()`, `.tolist()`) and also copies to the GPU, each
at least once per step, and the profiler saw the GPU idle for at least 5 % of the step in gaps that follow a
wait of the host. The gaps are divided among lines by their waits. The ceiling is measured: steps without
the line, or steps whose reads return at once. A round trip over several lines is reported as
[FO202](#fo202), at the line that reads.

Fix
Do this on the GPU, without `.cpu()` and `.to(device)`:

```diff
-token = torch.multinomial(p.cpu(), 1).to(device)
+token = torch.multinomial(p, 1)
```

Fix safety
Lossy if random numbers are drawn, because they come from another generator; otherwise exact or reordered,
depending on the operation.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.lines import show_calls
from flatout.doctor.rule import title_of
from flatout.doctor.rules.waits.sync_in_step import gaps_after_waits, waiting_lines
from flatout.ground.units import show_share
from flatout.measure.evidence import Evidence

ARMS = ("knock-out", "reads-free")  # the work on the host disappears too
RULE = title_of(__doc__, arms=ARMS)
SYNC_IN_STEP = "FO202"
BACK = frozenset(("cpu", "numpy", "tolist", "to", "__array__"))


def detect(evidence: Evidence) -> list[Finding]:
    copies = [site for site in evidence.sites if site.kind == "copy" and site.device.startswith("cuda")]
    sent = {site.place.at for site in copies if site.calls_per_step >= 1}
    findings: list[Finding] = []
    returning = waiting_lines(evidence, lambda site: site.place.at in sent, least_calls=1, least_share=0.0)
    for line, share in returning:
        if BACK.isdisjoint(line.ops):
            continue
        findings += RULE.proven(
            evidence,
            line.place,
            f"a tensor goes to the host and back {show_calls(line.calls_per_step)} times per step here; the "
            f"GPU then idles for {show_share(share)} of the step",
            figures=(gaps_after_waits(evidence),),
            share=share,
        )
    return findings


def explains_read(finding: Finding, other: Finding) -> bool:
    """Return whether `other` says what happens to the tensor that `finding` reports as read."""
    return finding.code == SYNC_IN_STEP and other.code == RULE.code and finding.place == other.place
