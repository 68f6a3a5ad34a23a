"""FO102 respawned-workers

What it does
Finds a loader that starts its worker processes again in every epoch. Without `persistent_workers=True`,
each `for batch in loader` forks or spawns all workers, copies the dataset to them, and discards them at the
end.

Why it costs
Nothing trains until the first worker is up and has its first batch. With `fork`, starting two workers took
36 to 52 ms in one small job; with `spawn` or `forkserver`, each worker imports the script and its libraries
again, which takes seconds per epoch. Short epochs pay this every few steps, and the median step hides it:
one measured job had a median wait of 7.9 ms and a mean of 228 ms.

Evidence
At least two epochs were observed, and starting one takes at least 5 % of an epoch: the loader's `iter()`,
the wait for the first batch beyond the time a batch takes to fetch and collate anyway, shutting down the
previous workers, and the slower first step, which copies the memory it shares with forked workers when it
writes to it. The ceiling is for the whole job, because no typical step contains an epoch's start: it is the
epoch without the measured start, limited to how much longer the first step of an epoch was observed to take.

Fix
```diff
-loader = DataLoader(dataset, batch_size=64, num_workers=4)
+loader = DataLoader(dataset, batch_size=64, num_workers=4, persistent_workers=True)
```

Build the loader once, before the loop over epochs: a loader built inside it starts its workers again
whatever its arguments.

Fix safety
Exact: the same batches in the same order. A dataset that changes in the main process between epochs is
the exception: persistent workers keep the copy they began with.
"""

from __future__ import annotations

from statistics import median

from flatout.doctor.ceilings import MOST, batches_per_step, share_of
from flatout.doctor.finding import Ceiling, Finding
from flatout.doctor.loading import loader_arguments, made_by
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence, Loader, Step

RULE = title_of(__doc__)
ARMS = ("epoch starts",)
TUNE = ("loader-workers", "lasting-workers")
LEAST_EPOCHS = 2
WRITES = ("backward", "optimizer")  # phases that write to gradients and parameters
LEAST_SHARE = 0.05


def detect(evidence: Evidence) -> list[Finding]:
    step_s = evidence.step_s
    if step_s is None:
        return []
    findings = []
    for loader in evidence.loaders:
        if not loader.trains or loader.num_workers == 0 or loader.persistent_workers:
            continue
        if len(loader.epochs) < LEAST_EPOCHS or not loader.num_batches:
            continue
        longer_s = _longer_s(evidence, step_s)
        start_s = _start_s(loader) + _cold_s(evidence)
        start_s = start_s if longer_s is None else min(start_s, longer_s)
        steps_s = loader.num_batches / batches_per_step(evidence) * step_s
        share = share_of(start_s, steps_s + (start_s if longer_s is None else longer_s))
        if share is not None and share >= LEAST_SHARE:
            findings.append(_finding(loader, start_s=start_s, share=share, step_s=step_s))
    return findings


def _longer_s(evidence: Evidence, step_s: float) -> float | None:
    """Return how much longer the first step of an epoch takes; None if no such step was timed."""
    first = [step.step_s for step in _first_steps(evidence)]
    return max(0.0, sum(first) / len(first) - step_s) if first else None


def _first_steps(evidence: Evidence) -> list[Step]:
    """Return the first steps of epochs."""
    return [step for step in evidence.steps if step.epoch_start and step.arm in ("real", "warmup")]


def _cold_s(evidence: Evidence) -> float:
    """Return how much longer training takes in the first step of an epoch, apart from work between epochs."""
    first, others = (
        [sum(step.phases_s.get(phase, 0.0) for phase in WRITES) for step in steps]
        for steps in (_first_steps(evidence), evidence.kept("real"))
    )
    return max(0.0, median(first) - median(others)) if first and others else 0.0


def _start_s(loader: Loader) -> float:
    """Return the mean seconds between two epochs that persistent workers would save."""
    # a new worker's first batches take longer than those of a worker that stays
    batch_s = sum(spread.median_s for spread in (loader.fetch_s, loader.collate_s) if spread is not None)
    starts = [epoch.iter_s + max(0.0, epoch.first_wait_s - batch_s) for epoch in loader.epochs]
    ends = [epoch.end_s for epoch in loader.epochs[1:]]  # nothing came before the first
    return sum(starts) / len(starts) + (sum(ends) / len(ends) if ends else 0.0)


def _finding(loader: Loader, *, start_s: float, share: float, step_s: float) -> Finding:
    return RULE.finding(
        loader.place,
        f"{loader.num_workers} workers start again at every epoch, {show_seconds(start_s)} each time: "
        f"{show_share(share)} of an epoch of {loader.num_batches} batches",
        figures=(
            f"{len(loader.epochs)} epochs begun, {show_seconds(start_s)} each beyond an ordinary batch",
            f"an ordinary step takes {show_seconds(step_s)}",
        ),
        share=share,
        ceiling=Ceiling(
            step_s=step_s,
            speedup=1.0,
            kind=ARMS[0],
            arm=ARMS[0],
            job_speedup=1 / (1 - min(share, MOST)),
        ),
        fix=_fix(loader),
    )


def _fix(loader: Loader) -> str:
    fix = loader_arguments(loader, persistent_workers=True)
    return fix if made_by(loader) else f"{fix}, and build it once, outside the loop over epochs"
