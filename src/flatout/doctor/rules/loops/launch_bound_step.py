"""FO305 launch-bound-step

What it does
Finds a training step in which the GPU waits for the host to launch its next kernel. The model's own
forward, backward and optimizer take the host longer than the GPU, and no loop, loader or wait in the script
explains it.

Why it costs
Python and torch need some 5 to 20 µs to launch a kernel. A kernel on a small tensor runs for 2 to 5 µs, so
the GPU is idle for most of the step, however fast it is: the step takes as long as its launches.

Evidence
The host's time in forward, loss, backward and optimizer exceeds the run time of the GPU's kernels by at
least 20 % of the step, and the GPU is busy for less than 70 % of it. The kernels' own time, recorded by
torch's profiler, gives the ceiling: a step whose launches cost nothing takes as long as its kernels, the
copies that run beside its launches, and what the host does outside the model. This finding is dropped if
one that names a line frees at least half as much, or if the model contains a Python loop whose gain could
not be measured.

Fix
It depends on the step:

- The same shapes in every step: `model = torch.compile(model, mode="reduce-overhead")` fuses small kernels
  and replays the rest as CUDA graphs, without launches.
- Memory left, and a half batch that takes as long as a whole one: a larger batch costs nothing more per
  step. Scale the learning rate with it.
- An optimizer that loops over parameters: `AdamW(parameters, fused=True)` makes one kernel of hundreds.
- Shapes that change or Python that dynamo cannot trace: compile the blocks that launch most, one by one.

```diff
-optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
+model = torch.compile(model, mode="reduce-overhead")
+optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
```

Fix safety
Reordered: fused kernels round differently. A larger batch changes the training itself.
"""

from __future__ import annotations

from flatout.doctor.ceilings import on_gpu, rows_cost_nothing, share_of
from flatout.doctor.finding import Ceiling, Finding
from flatout.doctor.lines import training_call
from flatout.doctor.rule import title_of
from flatout.doctor.unexplained import loss_share
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence, Kernels

RULE = title_of(__doc__)
ARMS = ("kernels",)
TUNE = ("compile", "foreach-optimizer", "merged-groups")
MODEL_PHASES = ("forward", "backward", "optimizer")
LEAST_GAP_SHARE = 0.2  # of the step: the GPU waits for launches of the model
BUSY = 0.7  # of the step: a busier GPU does not wait for launches
EXPLAINED = 0.5  # of this cause, freed by a finding that names a line
MOST_SHOWN = 3
LOOPS = "FO3"  # codes of rules on loops in the model, which launch what they repeat


def detect(evidence: Evidence) -> list[Finding]:
    kernels, step_s = evidence.kernels, evidence.step_s
    if not on_gpu(evidence) or kernels is None or not step_s:
        return []
    busy_s = _busy_s(kernels)
    if busy_s is None or busy_s >= BUSY * step_s:
        return []
    launching_s = sum(evidence.phase_s(phase) or 0.0 for phase in MODEL_PHASES)
    launching_s += (evidence.phase_s("rest") or 0.0) * loss_share(evidence)
    waits_s = (share_of(kernels.sync_gap_s, kernels.step_s) or 0.0) * step_s  # a cause of its own
    gap_s = min(launching_s, step_s) - busy_s - waits_s - _copies_beside_s(evidence, kernels)
    if gap_s < LEAST_GAP_SHARE * step_s:
        return []
    return [_finding(evidence, kernels, step_s=step_s, busy_s=busy_s, gap_s=gap_s)]


def _copies_beside_s(evidence: Evidence, kernels: Kernels) -> float:
    """Return the copies that run while the host launches: kernels wait for them, launches or not."""
    copies_s = sum(copy.total_s for copy in kernels.copies if copy.kind != "DtoD")
    return max(0.0, copies_s - (evidence.phase_s("transfer") or 0.0))


def explains_launches(finding: Finding, other: Finding) -> bool:
    """Return whether `other` names lines that free much of what launching costs."""
    if finding.code != RULE.code or other.code == RULE.code or finding.share is None or other.place is None:
        return False
    if other.ceiling is None:
        return other.code.startswith(LOOPS) or (other.share or 0.0) >= EXPLAINED * finding.share
    return 1 - 1 / other.ceiling.speedup >= EXPLAINED * finding.share


def _busy_s(kernels: Kernels) -> float | None:
    """Return the seconds per step in which a kernel ran: the profiler makes steps longer, but not kernels."""
    busy = kernels.busy_share
    if busy is None or kernels.gap_s is None or not kernels.num_kernels:
        return None
    return kernels.step_s * busy if busy >= 1 else kernels.gap_s * busy / (1 - busy)


def _finding(evidence: Evidence, kernels: Kernels, *, step_s: float, busy_s: float, gap_s: float) -> Finding:
    num = kernels.num_kernels
    mean_gap_s = (step_s - busy_s) / num
    figures = [
        f"{num:.0f} kernels per step, {show_seconds(kernels.median_kernel_s)} each in the median",
        f"kernels run for {show_seconds(busy_s)} of a step of {show_seconds(step_s)}",
        f"the mean gap between two of them is {show_seconds(mean_gap_s)}",
    ]
    most = evidence.operator_calls[:MOST_SHOWN]
    if most:
        callers = ", ".join(
            f"{each.caller}{f' ({each.place})' if each.place else ''} {each.calls_per_step:.0f}"
            for each in most
        )
        figures.append(f"most operators per step, the backward pass not counted: {callers}")
    if kernels.optimizer is not None:
        figures.append(f"the optimizer's update: {kernels.optimizer}")
    left_s = step_s - gap_s
    return RULE.finding(
        training_call(evidence),
        f"the GPU is busy for {show_share(busy_s / step_s)} of the step and waits for launches for "
        f"{show_share(gap_s / step_s)}: {num:.0f} kernels per step",
        figures=figures,
        share=gap_s / step_s,
        ceiling=Ceiling(step_s=left_s, speedup=step_s / left_s, kind="kernels"),
        fix=_fix(evidence, kernels),
    )


def _fix(evidence: Evidence, kernels: Kernels) -> str:
    words = 'torch.compile(model, mode="reduce-overhead"), which fuses kernels and replays CUDA graphs'
    if kernels.optimizer == "for-loop":
        words += "; fused=True for the optimizer"
    if rows_cost_nothing(evidence):
        words += (
            "; or a larger batch, which costs nothing: half of it takes as long (flatout plan says what fits)"
        )
    return words
