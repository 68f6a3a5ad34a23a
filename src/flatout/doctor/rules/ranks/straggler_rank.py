"""FO701 straggler-rank

What it does
Finds a rank that the others wait for in every step.

Why it costs
Ranks meet when gradients are exchanged. All of them take as long as the slowest, so extra work on one rank
costs the whole job, however many GPUs it has.

Evidence
Flatout compares what each rank does on its own. Backward and the optimizer do not count, because ranks wait
for each other there, nor does a phase in which the job calls collectives, such as the forward of sharded
models. The slowest takes at least 1.1 times the median of the others, and the difference is at least 5 % of
the step, also between the ends of their 95 % intervals over the steps. No arm removes a rank's extra work,
so there is a share and no ceiling.

Fix
See in which phase the rank differs. A longer wait points to its shard or its disk; a longer forward to
larger or longer batches; a longer rest to logging, evaluation or checkpoints that only this rank does:

```diff
-sampler = DistributedSampler(dataset)
+sampler = DistributedSampler(dataset, drop_last=True)   # equal shards
-if rank == 0:
+if rank == 0 and step % 1000 == 0:                      # seldom, or in a thread
     log(metrics)
```

Fix safety
Lossy: balanced shards change which samples share a batch.
"""

from __future__ import annotations

from statistics import median

from flatout.doctor.ceilings import share_of
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.doctor.sentences import least_lost_s, own_work_s, rank_name, straggler, waiting_phases
from flatout.ground.units import show_ratio, show_seconds, show_share
from flatout.measure.evidence import Evidence, Rank

RULE = title_of(__doc__)
LEAST_SHARE = 0.05


def detect(evidence: Evidence) -> list[Finding]:
    found = straggler(evidence.ranks)
    if found is None:
        return []
    rank, excess = found
    others = [other for other in evidence.ranks if other.rank != rank.rank]
    lost_s = own_work_s(rank) * (1 - 1 / excess)
    share = share_of(lost_s, rank.step_s)
    surely = share_of(least_lost_s(rank, evidence.ranks), rank.step_s)
    if share is None or surely is None or min(share, surely) < LEAST_SHARE:
        return []
    phase, more_s = _phase(rank, others)
    name = rank_name(rank, evidence.ranks)
    finding = RULE.finding(
        None,
        f"{name} makes the others wait {show_share(share)} of the step: outside backward and the "
        f"optimizer it takes {show_ratio(excess)} the median of the others, most of it in {phase}",
        figures=(
            f"its {phase} takes {show_seconds(more_s)} more than the median of the others",
            f"its own work is {show_seconds(own_work_s(rank))} of a step of {show_seconds(rank.step_s)}",
        ),
        share=share,
        ceiling=None,
        no_ceiling="no arm removes one rank's extra work",
        fix=f"find out why {name} takes longer in {phase}: its data, its batches, or work only it does",
    )
    return [finding]


def _phase(rank: Rank, others: list[Rank]) -> tuple[str, float]:
    """Return the phase in which a rank exceeds the others most, and by how much."""
    more_s = {
        phase: seconds - median(other.phases_s.get(phase, 0.0) for other in others)
        for phase, seconds in rank.phases_s.items()
        if phase not in waiting_phases(rank)
    }
    longest = max(more_s, key=lambda phase: more_s[phase])
    return longest, more_s[longest]
