"""FO301 tensor-created-in-loop

What it does
Finds a line that creates many small tensors in every step. `torch.tensor([kind], device=device)` in a loop
over samples or positions is the usual form.

Why it costs
Creating a tensor costs microseconds on a CPU and tens of microseconds on a GPU, where each creation also
copies its few bytes across the bus and waits for them, however small the tensor is. In one in-context RL
job on an H200 (batch 512), a step of 12.9 s fell to 8.9 s when only the creations in its loop were removed.

Evidence
One line of the job itself creates at least 10 tensors per step, and these calls hold at least 2 % of the
step. Creations inside libraries do not count, nor does what a dataset or a collate function makes for each
sample. The share includes what is computed only from such tensors and parameters, forward and backward (the
embedding of a constant, for example), because that disappears with the creation. On a GPU, host time counts
only while the GPU is idle. The ceiling is measured: steps without the block that contains the line, forward
and backward, plus what the device needs at its best for its arithmetic and bytes.

Fix
Create one tensor before the loop, or one from the whole list, and use its rows:

```diff
-embedded = [self.kind_embedding(torch.tensor(sample.kind, device=device)) for sample in samples]
+kinds = torch.tensor([sample.kind for sample in samples], device=device)  # one creation
+embedded = self.kind_embedding(kinds)                                      # one lookup
```

Constants belong in `register_buffer`, so that they move with the module.

Fix safety
Exact: the same values, created once.
"""

from __future__ import annotations

from flatout.doctor.ceilings import MOST, on_gpu
from flatout.doctor.finding import Finding
from flatout.doctor.lines import CodeLine, calls_and_timing, direct_lines, line_share, show_calls
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence

ARMS = ("knock-out",)
RULE = title_of(__doc__, arms=ARMS)
TUNE = ("one-gather", "one-tensor", "hoisted-constants")
LEAST_CALLS = 10
LEAST_SHARE = 0.02
LEAST_OWN_SHARE = 0.005  # below it the creation is not the cause


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    idle = _idle_share(evidence)
    for line in direct_lines(evidence, "create"):
        own = line_share(evidence, line)
        if own is None or own < LEAST_OWN_SHARE or line.calls_per_step < LEAST_CALLS:
            continue
        with_derived = 1 + (line.derived_s or 0.0) / line.total_s if line.total_s else 1.0
        share = min(own * with_derived, idle, MOST)
        if share >= LEAST_SHARE:
            findings += _finding(evidence, line, share=share)
    return findings


def _idle_share(evidence: Evidence) -> float:
    """Return the share of the step that the host can save: while kernels run, its time is free."""
    if not on_gpu(evidence) or evidence.kernels is None or evidence.kernels.busy_share is None:
        return 1.0
    return 1 - evidence.kernels.busy_share


def _finding(evidence: Evidence, line: CodeLine, *, share: float) -> list[Finding]:
    calls = show_calls(line.calls_per_step)
    figures = calls_and_timing(evidence, line)
    if line.derived_s:
        figures.append(f"{show_seconds(line.derived_s)} more in computations on these tensors alone")
    message = f"{calls} tensors are created here per step, {show_share(share)} of the step"
    return RULE.proven(evidence, line.place, message, figures=figures, share=share)
