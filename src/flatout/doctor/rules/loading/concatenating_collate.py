"""FO103 concatenating-collate

What it does
Finds a collate function that pads or joins arrays sample by sample. A line of it calls
`numpy.concatenate`, `numpy.pad`, `torch.cat` or a relative about once per sample of the batch.

Why it costs
Each call allocates an array and copies what is already there: a sample's values are copied twice or more,
and an array that grows by appending is copied once per sample, which is quadratic in the batch size. Each
call also costs some microseconds of Python and dispatch whatever its size, so a batch of 512 small samples
pays for thousands of them.

Evidence
While one batch was collated, one line made such calls at least 8 times and at least half as often as the
batch has samples. Collating also matters: it takes at least 5 % of the step if the training process does it
or, with workers, a fifth of their time while the step waits for them at least 5 % of its time. The ceiling
is measured: steps without the joining lines or, if those cannot run, steps on cached batches, which remove
all loading and so give an upper bound. It never exceeds the share observed for collating.

Fix
Allocate the batch once and copy each sample into its slice of it:

```diff
-batch = np.zeros((0, longest, width))
-for sample in samples:
-    batch = np.concatenate([batch, pad(sample)[None]])
-return torch.tensor(batch)
+batch = np.zeros((len(samples), longest, width), dtype=np.float32)
+for row, sample in enumerate(samples):
+    batch[row, : len(sample)] = sample
+return torch.from_numpy(batch)
```

`torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)` does the same for tensors.

Fix safety
Exact: the same numbers in the same places.
"""

from __future__ import annotations

from flatout.doctor import loading
from flatout.doctor.ceilings import batches_per_step, loading_costs_nothing, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.lines import show_calls
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Call, Evidence, Loader

ARMS = ("knock-out", "cached")
RULE = title_of(__doc__, arms=ARMS)
JOINING = frozenset(
    {
        "numpy.append",
        "numpy.concatenate",
        "numpy.hstack",
        "numpy.pad",
        "numpy.vstack",
        "torch.cat",
        "torch.concat",
        "torch.concatenate",
        "torch.hstack",
        "torch.nn.functional.pad",
        "torch.pad",
        "torch.vstack",
    }
)
LEAST_CALLS = 8
LEAST_CALLS_PER_SAMPLE = 0.5
LEAST_COLLATE_SHARE = 0.05
LEAST_WAIT_SHARE = 0.05
LEAST_COLLATE_PART = 0.2


def detect(evidence: Evidence) -> list[Finding]:
    if loading_costs_nothing(evidence):
        return []
    findings: list[Finding] = []
    for loader in evidence.loaders:
        share = _collate_share(evidence, loader) if loader.trains else None
        if share is None:
            continue
        waiting = loading.late_share(evidence, loader)
        most = share * loading.most_freed_share(evidence, loader, waiting) / waiting if waiting else share
        guilty = _guilty_lines(loader)
        total = sum(call.calls_per_batch for call in guilty)
        for call in guilty:
            part = call.calls_per_batch / total
            findings += _finding(evidence, loader, call, share=share * part, most=most)
    return findings


def _collate_share(evidence: Evidence, loader: Loader) -> float | None:
    """Return the share of the step that collating holds; None if it does not matter."""
    if loader.collate_s is None:
        return None
    if loader.num_workers == 0:
        per_step_s = loader.collate_s.mean_s * batches_per_step(evidence)
        share = share_of(per_step_s, evidence.step_s)
        return share if share is not None and share >= LEAST_COLLATE_SHARE else None
    waiting = loading.late_share(evidence, loader)
    fetch_s = loader.fetch_s.mean_s if loader.fetch_s is not None else 0.0
    part = share_of(loader.collate_s.mean_s, loader.collate_s.mean_s + fetch_s)
    if waiting is None or part is None or waiting < LEAST_WAIT_SHARE or part < LEAST_COLLATE_PART:
        return None
    return waiting * part


def _guilty_lines(loader: Loader) -> list[Call]:
    """Return joining calls of the collate function, summed by line, that are made about once per sample."""
    by_line: dict[tuple[str, int], list[Call]] = {}
    for call in loader.calls:
        if call.in_collate and call.function in JOINING:
            by_line.setdefault(call.place.at, []).append(call)
    least = max(LEAST_CALLS, LEAST_CALLS_PER_SAMPLE * (loader.batch_size or 0))
    summed = [
        Call(
            function=" and ".join(sorted({call.function for call in calls})),
            place=calls[0].place,
            in_collate=True,
            calls_per_batch=sum(call.calls_per_batch for call in calls),
        )
        for calls in by_line.values()
    ]
    return [call for call in summed if call.calls_per_batch >= least]


def _finding(evidence: Evidence, loader: Loader, call: Call, *, share: float, most: float) -> list[Finding]:
    assert loader.collate_s is not None
    samples = f" of {loader.batch_size} samples" if loader.batch_size is not None else ""
    where = f"{loader.num_workers} workers" if loader.num_workers else "the training process"
    return RULE.proven(
        evidence,
        call.place,
        f"collating a batch{samples} calls {call.function} {show_calls(call.calls_per_batch)} times "
        f"here, {show_share(share)} of the step",
        figures=(
            f"{call.function}: {show_calls(call.calls_per_batch)} calls per batch on this line",
            f"collating a batch takes {show_seconds(loader.collate_s.mean_s)} in {where}",
            f"the step takes {show_seconds(evidence.step_s)}",
        ),
        share=share,
        observed_share=most,
    )
