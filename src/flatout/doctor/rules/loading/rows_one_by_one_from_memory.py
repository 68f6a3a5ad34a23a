"""FO108 rows-one-by-one-from-memory

What it does
Finds a dataset of rows in memory that is asked for each row of a batch separately. `TensorDataset` is one:
each batch of 256 means 256 calls of `__getitem__` and one `torch.stack` over 256 small tensors.

Why it costs
A Python call and an index of one row take some microseconds each, whatever the row holds; the rows are then
copied once more to join them. Indexing with all row numbers at once does the same in one copy. Workers do
not help: sending a batch costs more than gathering it.

Evidence
Flatout asked the dataset for all indices of a batch at once, and it returned exactly the batch that the
loader collates. Steps on such batches are faster with the whole 95 % interval above 1.05×, and gain more
than steps with another number of workers. A dataset that cannot be asked this way, or that draws random
numbers for a sample, is left alone.

Fix
Give the dataset `__getitems__`, which a DataLoader calls with all indices of a batch, and do not collate
the result:

```diff
+class Rows(TensorDataset):
+    def __getitems__(self, indices):
+        return self[indices]
+
-loader = DataLoader(TensorDataset(x, y), batch_size=256, shuffle=True)
+loader = DataLoader(Rows(x, y), batch_size=256, shuffle=True, collate_fn=lambda batch: batch)
```

Fix safety
Exact: the same batches in the same order.
"""

from __future__ import annotations

from flatout.doctor.ceilings import RESOLVABLE_SPEEDUP, arm_at, wait_share
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.ground.units import show_ratio, show_seconds, show_share
from flatout.measure.evidence import Counterfactual, Evidence, Loader

ARMS = ("whole-batches",)
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True
OF_THE_LOADER = ("FO101", "FO105", "FO106", "FO107")  # rules on the same wait
AS_MUCH = 0.9  # of what the other finding frees


def detect(evidence: Evidence) -> list[Finding]:
    findings: list[Finding] = []
    for loader in evidence.loaders:
        whole, share = arm_at(evidence, ARMS[0], loader.place), wait_share(evidence, loader)
        workers = arm_at(evidence, "workers", loader.place)
        if not loader.trains or whole is None or share is None or whole.speedup_low <= RESOLVABLE_SPEEDUP:
            continue
        if workers is None or workers.speedup <= whole.speedup:
            findings += _finding(evidence, loader, whole, share=share)
    return findings


def _finding(evidence: Evidence, loader: Loader, whole: Counterfactual, *, share: float) -> list[Finding]:
    rows = f"{loader.batch_size} rows" if loader.batch_size is not None else "the rows"
    figures = [
        f"waiting for batches takes {show_share(share)} of the step",
        f"with whole batches a step takes {show_seconds(whole.step_s)}: {show_ratio(whole.speedup)}",
    ]
    if loader.fetch_s is not None and loader.collate_s is not None:
        fetch_s, collate_s = show_seconds(loader.fetch_s.mean_s), show_seconds(loader.collate_s.mean_s)
        figures.append(f"fetching the rows takes {fetch_s} per batch, collating them {collate_s}")
    message = f"{loader.dataset} is asked for {rows} of a batch one by one, and gives the same batch at once"
    fix = f"give {loader.dataset} a __getitems__(indices) that takes all rows of a batch at once"
    return RULE.proven(
        evidence, loader.place, message, figures=figures, share=share or None, observed_share=share, fix=fix
    )


def explains_rows(finding: Finding, other: Finding) -> bool:
    """Return whether `other` says that rows are taken one by one, and `finding` reports their wait."""
    if other.code != RULE.code or finding.code not in OF_THE_LOADER or other.ceiling is None:
        return False
    if finding.ceiling is None or finding.ceiling.kind == "cached":  # cached batches are not a remedy
        return True
    return _freed(other) >= AS_MUCH * _freed(finding)


def _freed(finding: Finding) -> float:
    return 0.0 if finding.ceiling is None else 1 - 1 / finding.ceiling.speedup
