"""FO304 batch-of-one-forwards

What it does
Finds a model that is called many times per step with one sample each. `[model(x[i : i + 1]) for i in
range(batch)]` is the usual form; so is a loader of single samples whose gradients are accumulated.

Why it costs
A forward of one row reads every weight once to use it once, and launches as many kernels as a forward of a
thousand rows. The device is then busy with launches and memory reads while its arithmetic units idle; the
same holds for the backward, which has as many small pieces.

Evidence
One line calls a module with parameters at least 8 times per step with a leading dimension of 1, at least
half as often as the step has samples, and these calls hold at least 10 % of the step. Recurrent modules are
left alone, because their leading dimension is time. The ceiling is measured: steps in which all rows go
through the model in one call or, if they cannot, steps without the loop.

Fix
Stack the samples and call the model once per step:

```diff
-outputs = torch.stack([model(sample[None])[0] for sample in samples])
+outputs = model(torch.stack(samples))
```

Pad samples of different lengths, or group them by length. With a loader, raise `batch_size` instead of
accumulating. If each call needs the result of the one before it, as in a game or while decoding, let several
games or sequences advance side by side.

Fix safety
Reordered: the same rows, summed in another order. With batch normalisation it is lossy: the statistics are
then computed over the batch instead of over one sample.
"""

from __future__ import annotations

import re

from flatout.doctor.ceilings import counted_step_s, rows_per_step, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.lines import show_calls
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.arms.arm import DEPENDS
from flatout.measure.evidence import Evidence, ModuleCall

ARMS = ("batched-call", "knock-out")
RULE = title_of(__doc__, arms=ARMS)
TUNE = ("one-tensor", "one-forward", "hoisted-constants")
SIDE_BY_SIDE = "let several games or sequences advance side by side, and call the model on a row of each"
LEAST_CALLS = 8
LEAST_CALLS_PER_SAMPLE = 0.5
LEAST_SHARE = 0.10
TIME_COMES_FIRST = re.compile(r"RNN|LSTM|GRU")


def detect(evidence: Evidence) -> list[Finding]:
    samples = rows_per_step(evidence)
    least = max(LEAST_CALLS, LEAST_CALLS_PER_SAMPLE * (samples or 0.0))
    findings = []
    for call in evidence.module_calls:
        if call.rows != 1 or not call.has_parameters or call.calls_per_step < least:
            continue
        if TIME_COMES_FIRST.search(call.module):
            continue
        share = share_of(call.host_s, counted_step_s(evidence))
        if share is not None and share >= LEAST_SHARE:
            findings += _finding(evidence, call, share=share)
    return findings


def _finding(evidence: Evidence, call: ModuleCall, *, share: float) -> list[Finding]:
    calls = show_calls(call.calls_per_step)
    counted = show_seconds(counted_step_s(evidence))
    return RULE.proven(
        evidence,
        call.place,
        f"{call.module} runs {calls} times per step on one row each, {show_share(share)} of the step",
        figures=(
            f"{call.module}: {calls} calls per step from this line, each with a leading dimension of 1",
            f"{show_seconds(call.host_s)} of a step of {counted} while calls were counted",
        ),
        share=share,
        fix=SIDE_BY_SIDE if _depend(evidence, call) else None,
    )


def _depend(evidence: Evidence, call: ModuleCall) -> bool:
    """Return whether the arm saw that a call needs the result of the one before it."""
    return any(
        each.kind in ARMS and each.place is not None and each.place.at == call.place.at
        for each in evidence.arms_not_run
        if DEPENDS in each.reason
    )
