"""FO603 compile-not-amortised

What it does
Finds a job that compiles its model and gains too little for the time that compiling takes.

Why it costs
Compiling takes seconds to minutes before the first step. It pays off if it shortens the step enough over
the steps that follow. A model that spends its time in large products has little to fuse, and one with a
slow loader waits for its batches as before.

Evidence
Flatout interleaves uncompiled steps with compiled ones. It reports a finding if the uncompiled steps are
faster, or if compiling took longer than an hour of compiled steps saves. If the job has graph breaks or
repeated compilations, those rules report instead, and say what to change.

Fix
Omit `torch.compile`, or compile only parts with many small operations. Or cache compiled code between runs:

```diff
-model = torch.compile(model)
+model.encoder = torch.compile(model.encoder)          # the part of many small operations
-python train.py
+TORCHINDUCTOR_FX_GRAPH_CACHE=1 python train.py        # or keep what was compiled between runs
```

Fix safety
Reordered: compiled code may round differently.
"""

from __future__ import annotations

from flatout.doctor.ceilings import RESOLVABLE_SPEEDUP, arm_at, ceiling_of
from flatout.doctor.finding import Finding
from flatout.doctor.lines import training_call
from flatout.doctor.rule import title_of
from flatout.ground.units import show_ratio, show_seconds
from flatout.measure.evidence import Compilation, Evidence, Place

RULE = title_of(__doc__)
ARMS = ("uncompiled",)
TUNE = ("uncompiled",)
LEAST_HOURS_S = 3600.0


def detect(evidence: Evidence) -> list[Finding]:
    compilation, arm = evidence.compilation, arm_at(evidence, ARMS[0], None)
    if compilation is None or arm is None or arm.speedup_low <= 0:
        return []
    compile_s = sum(function.compile_s for function in compilation.functions)
    most_saved = max(0.0, 1 / arm.speedup_low - 1)  # of a step, at most
    is_slower = arm.speedup_low > RESOLVABLE_SPEEDUP
    if not is_slower and LEAST_HOURS_S * most_saved >= compile_s:
        return []
    if is_slower:
        message = f"the step is {show_ratio(arm.speedup)} as fast without torch.compile"
    else:
        message = f"compiling took {show_seconds(compile_s)}, more than an hour of compiled steps saves"
    return [
        RULE.finding(
            _place(evidence, compilation),
            message,
            figures=(
                f"{show_seconds(arm.baseline_step_s)} per step, {show_seconds(arm.step_s)} uncompiled",
                f"{show_seconds(compile_s)} of compilation",
            ),
            ceiling=ceiling_of(arm, evidence) if is_slower else None,
            no_ceiling=None
            if is_slower
            else "compiling does not slow the step itself; it costs time beforehand",
        )
    ]


def _place(evidence: Evidence, compilation: Compilation) -> Place | None:
    """Return the line that keeps torch.compile from gaining, if one is known, else the model's call."""
    again = [each.place for each in compilation.functions if each.gave_up or each.num_late_steps > 1]
    known = [*again, *(found.place for found in compilation.breaks)]
    return next((place for place in known if place is not None), None) or training_call(evidence)
