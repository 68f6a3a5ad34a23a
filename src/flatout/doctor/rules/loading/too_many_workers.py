"""FO107 too-many-workers

What it does
Finds a training loader that is faster with fewer workers, or with none. More is not always better: in a
public report, 16 workers took twice as long as one.

Why it costs
Workers that compute share the cores with the training process and with each other: beyond the number of
cores they only take turns. Samples that are quick to make cost more to send between processes than to make.
Each worker also holds a copy of whatever the dataset changes, and takes time to start.

Evidence
Steps whose batches come from fewer workers, or from the training process itself, are faster with the whole
95 % interval above 1.05×, and gain more than steps with more workers. Fewer workers are tried if the step
waits for its loader, or if the job has more workers than cores.

Fix
Use the number that the finding names:

```diff
-loader = DataLoader(dataset, batch_size=64, num_workers=16)
+loader = DataLoader(dataset, batch_size=64, num_workers=1, persistent_workers=True)
```

Fix safety
Exact: the same samples in the same order. Random numbers drawn inside the dataset come from other workers'
generators.
"""

from __future__ import annotations

from flatout.doctor.ceilings import RESOLVABLE_SPEEDUP, arm_at, beside
from flatout.doctor.finding import Finding
from flatout.doctor.loading import loader_arguments
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Counterfactual, Evidence, Loader

ARMS = ("workers",)
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True
TUNE = ("loader-workers",)


def detect(evidence: Evidence) -> list[Finding]:
    findings: list[Finding] = []
    for loader in evidence.loaders:
        fewer = fewer_workers(evidence, loader)
        if fewer is not None:
            findings += _finding(evidence, loader, fewer)
    return findings


def fewer_workers(evidence: Evidence, loader: Loader) -> Counterfactual | None:
    """Return the steps with fewer workers, if they are the fastest that were tried."""
    found = arm_at(evidence, ARMS[0], loader.place) if loader.trains else None
    if found is None or not isinstance(found.value, float) or found.speedup_low <= RESOLVABLE_SPEEDUP:
        return None
    return found if found.value < (loader.num_workers or 0) else None


def _finding(evidence: Evidence, loader: Loader, fewer: Counterfactual) -> list[Finding]:
    number = int(fewer.value) if isinstance(fewer.value, float) else 0
    cores = evidence.host.cores
    figures = [f"with num_workers={number} the step takes {beside(fewer)}"]
    if cores:
        figures.append(f"the job may use {cores:g} cores")
    message = f"{loader.num_workers} workers make the step slower than {number or 'none'} would"
    share, fix = 1 - 1 / fewer.speedup, loader_arguments(loader, num_workers=number)
    return RULE.proven(evidence, loader.place, message, figures=figures, share=share, fix=fix)
