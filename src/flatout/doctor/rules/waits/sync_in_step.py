"""FO202 sync-in-step

What it does
Finds lines that make the host wait for the GPU in every step. `loss.item()`, `.tolist()`, `.cpu()`,
`if tensor:`, `print(tensor)` and `x[mask]` all need a number that the GPU has not computed yet.

Why it costs
The host normally runs ahead of the GPU and queues kernels for it. A sync drains that queue: when the
number arrives, the GPU has nothing left to run, and it idles until the host has caught up with the next
launches. The wait itself is not the loss; the gap after it is.

Evidence
On a GPU: a line syncs on a CUDA tensor at least once per step, and the profiler saw the GPU idle for at
least 5 % of the step in gaps that follow a wait of the host. The gaps are divided among lines by their
waits. Syncs on CPU tensors cost nothing and are not counted; neither are those that optimizers and gradient
scalers make themselves. The ceiling is measured: steps in which each such read returns at once, with the
value it gave last time.

Fix
Keep the value on the GPU (detach it) and read it only every many steps:

```diff
-total += loss.item()
+total += loss.detach()
 if step % 100 == 0:
-    print(total / 100)
+    print((total / 100).item())
```

For masks, `torch.where(mask, x, other)` has a fixed shape and needs no sync. For assertions and norms,
compare on the GPU and read the result once per log interval.

Fix safety
Exact: the same numbers, read later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flatout.doctor.ceilings import on_gpu, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.lines import CodeLine, lines_of, show_calls, show_ops
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence, Site

ARMS = ("reads-free",)
RULE = title_of(__doc__, arms=ARMS)
TUNE = ("late-items", "late-lists")
LEAST_CALLS = 1
LEAST_GAP_SHARE = 0.05
LEAST_LINE_SHARE = 0.01
# These read a number of their own once per step; no line of the user's can change that.
NOT_THE_USERS = ("torch/optim/", "torch/amp/", "torch/cuda/amp/")


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for line, share in waiting_lines(evidence, lambda site: True, least_calls=LEAST_CALLS):
        findings += _finding(evidence, line, share=share)
    return findings


def waiting_lines(
    evidence: Evidence,
    chosen: Callable[[Site], bool],
    *,
    least_calls: float,
    least_share: float = LEAST_LINE_SHARE,
) -> Iterator[tuple[CodeLine, float]]:
    """Yield the lines that wait for the GPU this often per step, and the idle share after these waits."""
    kernels = evidence.kernels
    if not on_gpu(evidence) or kernels is None:
        return
    gap_share = share_of(kernels.sync_gap_s, kernels.step_s)
    if gap_share is None or gap_share < LEAST_GAP_SHARE:
        return
    waiting = [site for site in evidence.sites if waits_for_the_gpu(site)]
    # Waits that no line of the user's makes (copies, the optimizer) keep their part of the gap.
    waits = max(sum(site.calls_per_step for site in waiting), kernels.num_syncs or 0.0)
    for line in lines_of([site for site in waiting if chosen(site)]):
        if line.calls_per_step >= least_calls:
            share = gap_share * line.calls_per_step / waits
            if share >= least_share:
                yield line, share


def gaps_after_waits(evidence: Evidence) -> str:
    """Say how long the GPU idles after waits."""
    assert evidence.kernels is not None
    gaps, profiled = (show_seconds(each) for each in (evidence.kernels.sync_gap_s, evidence.kernels.step_s))
    return f"gaps after a wait: {gaps} of a profiled step of {profiled}"


def waits_for_the_gpu(site: Site) -> bool:
    if site.kind != "sync" or not site.device.startswith("cuda"):
        return False
    via = (site.via or "").replace("\\", "/")
    return not any(part in via for part in NOT_THE_USERS)


def _finding(evidence: Evidence, line: CodeLine, *, share: float) -> list[Finding]:
    waits = show_calls(line.calls_per_step)
    message = (
        f"the host waits for the GPU {waits} times per step here ({show_ops(line)}); "
        f"the GPU then idles for {show_share(share)} of the step"
    )
    figures = (f"{show_ops(line)}: {waits} per step on a CUDA tensor", gaps_after_waits(evidence))
    return RULE.proven(evidence, line.place, message, figures=figures, share=share)
