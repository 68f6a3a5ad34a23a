"""FO105 loader-bound

What it does
Finds a training loader that cannot keep up, so that the step waits for its batches. The loader has workers,
or it has none because no core is free for them or because they gain nothing.

Why it costs
A step cannot be shorter than a worker's time for a batch divided by the number of workers. While the queue
is empty, the device has nothing to do.

Evidence
The wait is at least 10 % of the step. The loader has workers, or each process has less than two cores, or
workers were tried without a gain. Only waits for batches that no worker had finished count: handing finished
ones over must take 23 % of the step, because a busy machine alone delays it. Steps on cached batches, or
with more workers, are faster with the whole 95 % interval above 1.05×. If a collate function explains the
time, that is reported instead; so is a loader that fewer workers make faster. The ceiling is measured:
steps with another number of workers if that was tried and helps, otherwise steps on cached batches, for
which the loader costs nothing. It never exceeds the observed wait plus what the workers' own work takes from
the step, their CPU time divided by the cores. The workers' stacks name the lines in which they make a batch,
and their CPU time distinguishes work from waiting.

Fix
If workers wait for storage, use more of them, even more than there are cores:

```diff
-loader = DataLoader(dataset, batch_size=64, num_workers=2)
+loader = DataLoader(dataset, batch_size=64, num_workers=8, persistent_workers=True, prefetch_factor=4)
```

If they compute, make samples cheaper: do once what does not change between epochs, decode at the size you
need, or move the work to the device. If samples are rows in memory, sending them between processes costs
more than reading them; take a whole batch at once:

```diff
 class Rows(Dataset):
-    def __getitem__(self, index):
-        return self.x[index], self.y[index]
+    def __getitems__(self, indices):        # one gather for the batch
+        return list(zip(self.x[indices], self.y[indices]))
```

Fix safety
Exact: the same samples in the same order. Random numbers drawn inside the dataset come from other workers'
generators.
"""

from __future__ import annotations

from dataclasses import replace

from flatout.doctor import loading
from flatout.doctor.ceilings import RESOLVABLE_SPEEDUP, arm_at, wait_share
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.doctor.rules.loading import concatenating_collate
from flatout.doctor.rules.loading.too_many_workers import fewer_workers
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Counterfactual, Evidence, Loader

RULE = title_of(__doc__)
ARMS = ("workers", "cached")
TUNE = ("loader-workers", "prefetch-factor", "worker-threads")
LEAST_WAIT_SHARE = 0.10
LEAST_HANDED_OVER_SHARE = 1 - 1 / 1.3  # of the step, for batches that were ready
HAND_OVER_LESS = (
    "hand over less: a few large tensors per batch, which processes share, instead of NumPy arrays, lists or "
    "many small tensors, which are copied one by one"
)


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for loader in evidence.loaders:
        share, late = wait_share(evidence, loader), loading.late_share(evidence, loader)
        if not loader.trains or share is None or late is None or not _is_ours(loader, evidence):
            continue
        if late < LEAST_WAIT_SHARE and share < LEAST_HANDED_OVER_SHARE:
            continue
        cached, workers = evidence.counterfactual("cached"), arm_at(evidence, "workers", loader.place)
        if not (_gains(cached) or _gains(workers)) or fewer_workers(evidence, loader) is not None:
            continue
        if not concatenating_collate.detect(replace(evidence, loaders=(loader,))):
            is_late = late >= LEAST_WAIT_SHARE
            findings += _finding(
                evidence, loader, share=share, is_late=is_late, cached=cached, workers=workers
            )
    return findings


def _is_ours(loader: Loader, evidence: Evidence) -> bool:
    """Return whether the loader has workers, has no core left for them, or gained nothing from them."""
    if loader.num_workers != 0:
        return bool(loader.num_workers)
    cores = loading.cores_of_a_process(evidence)
    return (cores is not None and cores < loading.LEAST_CORES) or _in_vain(
        arm_at(evidence, "workers", loader.place)
    )


def _in_vain(workers: Counterfactual | None) -> bool:
    return workers is not None and workers.speedup_high < RESOLVABLE_SPEEDUP


def _gains(found: Counterfactual | None) -> bool:
    return found is not None and found.speedup_low > RESOLVABLE_SPEEDUP


def _finding(
    evidence: Evidence,
    loader: Loader,
    *,
    share: float,
    is_late: bool,
    cached: Counterfactual | None,
    workers: Counterfactual | None,
) -> list[Finding]:
    cores = evidence.host.cores or 0.0
    figures = [
        f"waiting for batches takes {show_share(share)} of the step",
        f"the job may use {cores:g} cores" if cores else "the number of cores is unknown",
    ]
    if cached is not None:
        figures.append(f"on cached batches the step takes {show_seconds(cached.step_s)}")
    if workers is not None:
        figures.append(f"with num_workers={_count(workers)} the step takes {show_seconds(workers.step_s)}")
    ready_s = loading.batch_s(loader)
    if ready_s is not None:
        figures.append(f"one process makes a batch in {show_seconds(ready_s)}")
    who = f"{loader.num_workers} workers" if loader.num_workers else "the training process"
    message = f"{who} cannot keep up: waiting for batches is {show_share(share)} of the step"
    if not is_late:
        figures.append("workers had nearly all batches ready when they were asked for")
        message = f"handing over batches that {who} have ready takes {show_share(share)} of the step"
    return RULE.proven(
        evidence,
        loader.place,
        message,
        arms=ARMS if _gains(workers) else ARMS[1:],
        figures=[*figures, *loading.figures(loader)],
        share=share,
        observed_share=loading.most_freed_share(evidence, loader, share),
        fix=_fix(loader, workers, cores=cores) if is_late or _gains(workers) else HAND_OVER_LESS,
    )


def _fix(loader: Loader, workers: Counterfactual | None, *, cores: float) -> str:
    if workers is not None and _gains(workers):
        return loading.loader_arguments(loader, num_workers=_count(workers))
    lines = loading.slow_lines(loader, most=1)
    cheaper = f"make samples cheaper{f', above all at {lines[0][0]}' if lines else ''}"
    if not loader.num_workers and _in_vain(workers):
        if loader.takes_many:
            return f"{cheaper}: workers gain nothing here"
        return (
            "make whole batches at once (a dataset with __getitems__, or tensors indexed in the loop): "
            "workers gain nothing here"
        )
    # workers that compute leave a core to the training process
    most = loading.most_workers(loader, int(cores))
    used = (loader.num_workers or 0) + (0 if loading.is_blocked(loader) else 1)
    if loader.num_workers and workers is None and used < most:
        return f"{loading.loader_arguments(loader, num_workers=most)}, or fewer if they suffice"
    if loading.is_blocked(loader):
        where = f", above all at {lines[0][0]}" if lines else ""
        less = f"wait less for storage{where}, by larger reads or a local copy"
        return less if workers is None else f"{less}: more workers were not seen to help"
    return f"{cheaper}: more workers would share the {cores:g} cores of this job"


def _count(workers: Counterfactual) -> str:
    return f"{workers.value:g}" if isinstance(workers.value, (int, float)) else str(workers.value)
