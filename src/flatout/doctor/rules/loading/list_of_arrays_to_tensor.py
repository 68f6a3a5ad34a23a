"""FO110 list-of-arrays-to-tensor

What it does
Finds lines that make a tensor from a list of NumPy arrays. `torch.tensor([a, b, c])` with arrays in the
list is slow everywhere: in a dataset, a collate function or the training loop.

Why it costs
torch reads such a list like any other: number by number, each converted to a Python object first. NumPy
joins the arrays by copying their memory. torch itself warns that this is extremely slow: in a public
report, 0.745 s became 0.013 s.

Evidence
Flatout looked at the arguments of the calls, in a batch or step that is not timed: a list, or a list of
lists, of arrays. The line holds at least 5 % of the step, by stack samples or by the time of its calls. The
ceiling is measured: steps without the line, or else on cached batches; it never exceeds the share that the
line holds.

Fix
Join the arrays first: `torch.from_numpy(np.stack(arrays))`.

```diff
-batch = torch.tensor(arrays)
+batch = torch.from_numpy(np.stack(arrays))
```

Fix safety
Exact: the same numbers; `torch.from_numpy` keeps their dtype, as `torch.tensor` does.
"""

from __future__ import annotations

from flatout.doctor import loading
from flatout.doctor.ceilings import loading_costs_nothing
from flatout.doctor.finding import Finding
from flatout.doctor.lines import direct_lines, line_share, show_calls
from flatout.doctor.rule import title_of
from flatout.ground.units import show_share
from flatout.measure.evidence import Evidence, Loader, Place

RULE = title_of(__doc__)
ARMS = ("knock-out", "cached")
LEAST_SHARE = 0.05
FEWEST_SAMPLES = 20
OF_ARRAYS = " of arrays"


def detect(evidence: Evidence) -> list[Finding]:
    findings: list[Finding] = []
    if not loading_costs_nothing(evidence):
        for loader in evidence.loaders:
            findings += _in_loader(evidence, loader)
    for line in direct_lines(evidence, "create"):
        share = line_share(evidence, line)
        if any(op.endswith(OF_ARRAYS) for op in line.ops) and share is not None and share >= LEAST_SHARE:
            calls = f"{show_calls(line.calls_per_step)} per step"
            findings += _finding(evidence, line.place, share=share, calls=calls, arms=ARMS[:1])
    return findings


def _in_loader(evidence: Evidence, loader: Loader) -> list[Finding]:
    """Find lines of the dataset and the collate function, by samples of the process that makes batches."""
    waiting = loading.late_share(evidence, loader) if loader.trains else None
    looks = sum(line.samples for line in loader.lines)
    if waiting is None or looks < FEWEST_SAMPLES:
        return []
    findings: list[Finding] = []
    for call in loader.calls:
        here = sum(line.samples for line in loader.lines if line.place and line.place.at == call.place.at)
        share = waiting * here / looks
        if call.function.endswith(OF_ARRAYS) and share >= LEAST_SHARE:
            calls = f"{show_calls(call.calls_per_batch)} per batch"
            findings += _finding(evidence, call.place, share=share, calls=calls, arms=ARMS)
    return findings


def _finding(
    evidence: Evidence, place: Place, *, share: float, calls: str, arms: tuple[str, ...]
) -> list[Finding]:
    return RULE.proven(
        evidence,
        place,
        f"a tensor is made here from a list of NumPy arrays, {show_share(share)} of the step",
        arms=arms,
        figures=(f"calls with a list of arrays: {calls}",),
        share=share,
        observed_share=share if len(arms) > 1 else None,
    )
