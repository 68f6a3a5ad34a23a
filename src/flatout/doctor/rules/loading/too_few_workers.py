"""FO106 too-few-workers

What it does
Finds a loader whose workers cannot keep up, while more of them could. The step waits for batches though the
loader has workers.

Why it costs
Each worker makes one batch at a time. If a batch takes longer than the step times the number of workers, the
device waits for the difference, step after step. Workers that wait for storage leave their core to others, so
that more of them than cores can pay off.

Evidence
The wait is at least 10 % of the step. The ceiling is measured: steps whose batches came from a second loader
over the same dataset with that many workers, no faster than they can go on for ever.

Fix
```python
loader = DataLoader(dataset, batch_size=64, num_workers=8, persistent_workers=True)
```

Fix safety
Exact: the batches and their order stay the same. Only random numbers drawn inside the dataset come from other
workers' generators. Each worker holds its own copy of the dataset and its prefetched batches in memory.
"""

from __future__ import annotations

from flatout.doctor.ceilings import RESOLVABLE_SPEEDUP, arm_at, wait_share
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence, Loader

RULE = title_of(__doc__)
ARMS = ("workers",)
LEAST_WAIT_SHARE = 0.10


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for loader in evidence.loaders:
        share = wait_share(evidence, loader) if loader.trains and loader.num_workers else None
        if share is not None and share >= LEAST_WAIT_SHARE:
            findings += _finding(evidence, loader, share=share)
    return findings


def _finding(evidence: Evidence, loader: Loader, *, share: float) -> list[Finding]:
    more = arm_at(evidence, ARMS[0], loader.place)
    if more is None or more.value is None or more.speedup_low <= RESOLVABLE_SPEEDUP:
        return []
    num_workers = int(more.value)
    if num_workers <= (loader.num_workers or 0):
        return []
    instead = f"{show_seconds(more.step_s)} instead of {show_seconds(more.baseline_step_s)}"
    figures = [
        f"waiting for batches takes {show_share(share)} of the step",
        f"with {num_workers} workers the step takes {instead}",
    ]
    if loader.fetch_s is not None and loader.collate_s is not None:
        made_s = loader.fetch_s.mean_s + loader.collate_s.mean_s
        figures.append(f"one worker needs {show_seconds(made_s)} for a batch")
    return RULE.proven(
        evidence,
        loader.place,
        f"{loader.num_workers} workers are too few: the step waits for them {show_share(share)} of the time",
        arms=ARMS,
        figures=figures,
        share=share,
        observed_share=share,
        fix=f"give this DataLoader num_workers={num_workers}",
        safety="exact",
    )
