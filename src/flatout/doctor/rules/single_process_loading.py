"""FO101 single-process-loading

What it does
Finds a training loader with `num_workers=0` whose batches the step waits for. Samples are then read,
transformed and collated in the training process itself, between two steps.

Why it costs
While one core prepares the next batch, the device has nothing to do, and the machine's other cores
never help. In a study of 400 under-used deep-learning jobs, 46 % of the 706 causes lay in data
handling.

Evidence
The wait is at least 10 % of the step, the job may use at least two cores, and the same job was run on
cached batches, in blocks interleaved with ordinary steps: it must be faster with the whole 95 %
interval above 1.05×. That run is the ceiling, so it is measured.

Fix
Let worker processes prepare batches while the device computes:

```python
loader = DataLoader(dataset, batch_size=64, num_workers=2, persistent_workers=True)
```

Use no more workers than the job has cores. If the samples are small and already in memory, workers can
cost more than they save: batches then travel between processes. Index whole batches at once instead
(`dataset[indices]` through a batch sampler), and let a measurement decide; the finding says so where a
batch is made in less than a millisecond.

Fix safety
Exact: the batches and their order stay the same. Only random numbers drawn inside the dataset come from
the workers' own generators.
"""

from __future__ import annotations

from flatout.doctor.arithmetic import RESOLVABLE_SPEEDUP, measured_ceiling, wait_share
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Counterfactual, Evidence, Loader
from flatout.units import show_ratio, show_seconds, show_share

CODE, NAME = title_of(__doc__)
LEAST_WAIT_SHARE = 0.10
LEAST_CORES = 2
# A batch of 2 kB to 0.5 MB from a worker took 1.0 to 1.6 ms longer than one made in place, on two cores.
HANDED_OVER_S = 1e-3


def detect(evidence: Evidence) -> list[Finding]:
    cores = evidence.host.cores
    cached = evidence.counterfactual("cached")
    if cores is None or cores < LEAST_CORES or cached is None or cached.speedup_low <= RESOLVABLE_SPEEDUP:
        return []
    findings = []
    for loader in evidence.loaders:
        share = wait_share(evidence, loader)
        if loader.trains and loader.num_workers == 0 and share is not None and share >= LEAST_WAIT_SHARE:
            findings.append(_finding(loader, share=share, cached=cached, cores=cores))
    return findings


def _finding(loader: Loader, *, share: float, cached: Counterfactual, cores: float) -> Finding:
    interval = f"{show_ratio(cached.speedup_low)} to {show_ratio(cached.speedup_high)}"
    without = f"{show_seconds(cached.step_s)} instead of {show_seconds(cached.baseline_step_s)}"
    evidence = [
        f"waiting for batches takes {show_share(share)} of the step",
        f"on cached batches the step takes {without}: {show_ratio(cached.speedup)} ({interval})",
        f"the job may use {cores:g} cores",
    ]
    if loader.fetch_s is not None:
        evidence.append(f"fetching the samples of a batch takes {show_seconds(loader.fetch_s.mean_s)}")
    if loader.collate_s is not None:
        evidence.append(f"collating them takes {show_seconds(loader.collate_s.mean_s)}")
    return Finding(
        code=CODE,
        name=NAME,
        place=loader.place,
        message=f"the training process loads every batch itself, {show_share(share)} of the step",
        evidence=tuple(evidence),
        share=share,
        ceiling=measured_ceiling(cached),
        fix=_fix(loader, cores=cores),
        safety="exact",
    )


def _fix(loader: Loader, *, cores: float) -> str:
    if loader.fetch_s is not None and loader.collate_s is not None:
        ready_s = loader.fetch_s.mean_s + loader.collate_s.mean_s
        if ready_s < HANDED_OVER_S:
            return (
                f"index whole batches at once, dataset[indices]; one is ready in {show_seconds(ready_s)}, so "
                "workers may cost more than they save: flatout.data.choose_workers measures it"
            )
    workers = max(1, min(int(cores) - 1, 8))
    return f"give this DataLoader num_workers={workers} and persistent_workers=True"
