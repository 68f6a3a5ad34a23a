"""FO702 exposed-communication

What it does
Finds time in which ranks exchange gradients and compute nothing.

Why it costs
Gradients can be exchanged while backward still computes those of earlier layers. In every step, every GPU of
the job waits for the part of the exchange that remains when backward ends.

Evidence
Flatout interleaves steps in which DistributedDataParallel exchanges nothing with ordinary steps, and takes
the slowest rank, which waits for no other. If that cannot run (FSDP, static graphs), it uses the profiler's
time in which a collective was running and nothing computed, of the rank that has least of it, because the
others also wait there for stragglers. The result is at least 5 % of the step.

Fix
Exchange gradients once for several batches, compress them, or give each GPU a larger batch:

```diff
-loss.backward()
+with nullcontext() if last_micro_batch else model.no_sync():   # once for several backward passes
+    loss.backward()
+model.register_comm_hook(None, default_hooks.bf16_compress_hook)   # or half of the bytes
```

A larger batch per GPU gives more computation to hide the same exchange behind. Buckets of the default 25 MB
start early; one bucket of the whole model starts only when backward ends.

Fix safety
Lossy: accumulation changes the batch of a step, and compressed gradients are rounded.
"""

from __future__ import annotations

from flatout.doctor.ceilings import MOST
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.doctor.sentences import rank_name
from flatout.ground.units import show_bytes, show_share
from flatout.measure.evidence import Evidence

ARMS = ("unsynchronised",)
RULE = title_of(__doc__, arms=ARMS)
LEAST_SHARE = 0.05


def detect(evidence: Evidence) -> list[Finding]:
    if len(evidence.ranks) < 2:
        return []
    exposed = {rank.rank: rank.exposed_share for rank in evidence.ranks if rank.exposed_share is not None}
    arm = evidence.counterfactual(ARMS[0])
    share = (
        1 - 1 / arm.speedup if arm is not None and arm.speedup > 0 else min(exposed.values(), default=None)
    )
    if share is None or share < LEAST_SHARE:
        return []
    share = min(share, MOST)
    return RULE.proven(
        evidence,
        None,
        f"{show_share(share)} of the step is an exchange between ranks that no computation hides",
        figures=[*_by_rank(evidence, exposed), *_network(evidence)],
        share=share,
    )


def _by_rank(evidence: Evidence, exposed: dict[int, float]) -> list[str]:
    if not exposed:
        return []
    by_share = sorted(
        (rank for rank in evidence.ranks if rank.rank in exposed), key=lambda r: exposed[r.rank]
    )
    least, most = by_share[0], by_share[-1]
    shown = [
        f"{show_share(exposed[each.rank])} ({rank_name(each, evidence.ranks)})" for each in (least, most)
    ]
    figures = [f"by the profiler, of the step: {' to '.join(shown)}"]
    if least.communication_share is not None:
        figures.append(f"a collective is under way for {show_share(least.communication_share)} of the step")
    return figures


def _network(evidence: Evidence) -> list[str]:
    network = evidence.network
    if network is None or network.bus_bytes_per_s is None:
        return []
    return [
        f"an all-reduce of {network.backend} moves {show_bytes(network.bus_bytes_per_s)}/s through each link"
    ]
