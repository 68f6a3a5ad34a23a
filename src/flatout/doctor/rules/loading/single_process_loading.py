"""FO101 single-process-loading

What it does
Finds a training loader with `num_workers=0` whose batches the step waits for. The training process itself
then reads, transforms and collates samples between two steps.

Why it costs
While one core prepares the next batch, the device has nothing to do, and the machine's other cores
never help. In a study of 400 under-used deep-learning jobs, 46 % of the 706 causes lay in data
handling.

Evidence
The wait is at least 10 % of the step, and the process may use at least two cores. If no arm could run, the
typical batch must be waited for as long: other jobs hold up a few. The ceiling is measured:
steps on a loader of the same dataset with workers or, if that could not run, steps on cached batches, which
remove all loading and so give an upper bound. It never exceeds the observed wait.

Fix
Let worker processes prepare batches while the device computes:

```diff
-loader = DataLoader(dataset, batch_size=64)
+loader = DataLoader(dataset, batch_size=64, num_workers=2, persistent_workers=True)
```

The finding recommends as many workers as would hide the loading behind the rest of the step, but no more
than the process has cores; if making a batch is mostly waiting for storage or the network, up to four per
core. If the cores do not suffice, it says how short the step can get with workers alone: reaching the
ceiling then also takes less work per sample, or samples that are prepared once.

If the samples are small and already in memory, workers can cost more than they save, because batches then
travel between processes. Index whole batches at once instead (`dataset[indices]` through a batch sampler),
and let a measurement decide; the finding says so if a batch is made in less than a millisecond.

With an `IterableDataset`, every worker has all samples: each must yield its own share, based on
`torch.utils.data.get_worker_info`, or an epoch contains every sample several times.

Fix safety
Exact: the batches and their order stay the same if a sample depends on its index alone. Random numbers
drawn inside the dataset come from the workers' own generators, and each worker has a copy of what the
dataset keeps, such as an open file or a counter. Lossy for an `IterableDataset`, whose shares come in
another order.
"""

from __future__ import annotations

import math

from flatout.doctor import loading
from flatout.doctor.ceilings import RESOLVABLE_SPEEDUP, arm_at, beside, wait_share
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.ground.units import show_ratio, show_seconds, show_share
from flatout.measure.evidence import Counterfactual, Evidence, Loader

ARMS = ("workers", "cached")
RULE = title_of(__doc__, arms=ARMS)
TUNE = ("loader-workers",)
LEAST_WAIT_SHARE = 0.10
# A batch of 2 kB to 0.5 MB from a worker took 1.0 to 1.6 ms longer than one made in place, on two cores.
HANDED_OVER_S = 1e-3


def detect(evidence: Evidence) -> list[Finding]:
    cached = evidence.counterfactual("cached")
    cores = loading.cores_of_a_process(evidence)
    if cores is None or cores < loading.LEAST_CORES:
        return []
    findings = []
    for loader in evidence.loaders:
        share, workers = wait_share(evidence, loader), arm_at(evidence, "workers", loader.place)
        if not loader.trains or loader.num_workers != 0 or share is None or share < LEAST_WAIT_SHARE:
            continue
        if cached is not None and not _leaves_a_gain(cached, workers):
            continue
        is_tried = cached is not None or workers is not None
        if is_tried or share * _typical_part(loader) >= LEAST_WAIT_SHARE:
            findings += _finding(evidence, loader, share=share, cores=cores)
    return findings


def _leaves_a_gain(cached: Counterfactual, workers: Counterfactual | None) -> bool:
    """Return whether cached batches gain or, if they cannot tell, workers were measured to."""
    if cached.speedup_low > RESOLVABLE_SPEEDUP:
        return True
    is_open = cached.speedup_high > RESOLVABLE_SPEEDUP
    return is_open and workers is not None and workers.speedup_low > RESOLVABLE_SPEEDUP


def _typical_part(loader: Loader) -> float:
    """Return the median wait divided by the mean, which a few long ones raise."""
    waits = loader.wait_s
    return waits.median_s / waits.mean_s if waits is not None and waits.mean_s > 0 else 1.0


def _finding(evidence: Evidence, loader: Loader, *, share: float, cores: int) -> list[Finding]:
    cached, workers = evidence.counterfactual("cached"), arm_at(evidence, "workers", loader.place)
    figures = [
        f"waiting for batches takes {show_share(share)} of the step",
        f"the process may use {cores} cores",
    ]
    if cached is not None:
        figures.insert(1, f"on cached batches the step takes {_with_interval(cached)}")
    if workers is not None:
        figures.insert(1, f"with num_workers={workers.value:g} the step takes {_with_interval(workers)}")
    if loader.fetch_s is not None:
        figures.append(f"fetching the samples of a batch takes {show_seconds(loader.fetch_s.mean_s)}")
    if loader.collate_s is not None:
        figures.append(f"collating them takes {show_seconds(loader.collate_s.mean_s)}")
    figures += loading.figures(loader)
    figures.append(
        "workers make the same batches if a sample depends on its index alone: each has random numbers and a "
        "copy of the dataset of its own"
    )
    return RULE.proven(
        evidence,
        loader.place,
        f"the training process loads every batch itself, {show_share(share)} of the step",
        figures=figures,
        share=share,
        observed_share=share,
        fix=_fix(loader, cached=cached, workers=workers, cores=cores),
        safety="lossy" if loader.streams else "exact",
    )


def _with_interval(found: Counterfactual) -> str:
    return f"{beside(found)} ({show_ratio(found.speedup_low)} to {show_ratio(found.speedup_high)})"


def _fix(loader: Loader, *, cached: Counterfactual | None, workers: Counterfactual | None, cores: int) -> str:
    if loader.fetch_s is not None and loader.collate_s is not None:
        ready_s = loader.fetch_s.mean_s + loader.collate_s.mean_s
        if ready_s < HANDED_OVER_S:
            way = "index whole batches at once, dataset[indices]"
            if loader.streams:
                way = "let the dataset yield whole batches, with batch_size=None"
            elif loader.batch_size == 1:
                way = "take more than one sample per batch, if the job allows it"
            return (
                f"{way}; one is ready in {show_seconds(ready_s)}, so workers may cost more than they save: "
                "flatout.data.choose_workers measures it"
            )
    if workers is not None and workers.value is not None:
        num_workers = int(workers.value)
    else:
        most = loading.most_workers(loader, cores)
        num_workers = min(2, cores) if cached is None else _workers(cached, cores=most)
    fix = loading.loader_arguments(loader, num_workers=num_workers, persistent_workers=True)
    if loader.streams:
        fix += ", and let each worker yield a share of its own (get_worker_info)"
    if cached is None or workers is not None:
        return fix
    best_s = (cached.baseline_step_s - cached.step_s) / num_workers
    if best_s <= RESOLVABLE_SPEEDUP * cached.step_s:
        return fix
    return f"{fix}; that reaches {show_seconds(best_s)} at best; more than that takes cheaper samples"


def _workers(cached: Counterfactual, *, cores: int) -> int:
    """Return the fewest workers that hide the loading, and one to spare; the training process keeps a core.

    If they cannot hide it, the training process mostly waits for them, and they can use its core.
    """
    hiding = max(1, math.ceil(cached.speedup_high - 1))
    return cores if hiding >= cores else min(hiding + 1, max(1, cores - 1))
