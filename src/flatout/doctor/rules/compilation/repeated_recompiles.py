"""FO601 repeated-recompiles

What it does
Finds a function that torch.compile compiles again in step after step, or has given up on.

Why it costs
Compiling takes from a tenth of a second to minutes, and the step waits for it. Compiled code is valid only
for the values that its guards name; a Python number that changes, a tensor of another length or a new
function object makes it invalid. After eight versions of one function dynamo gives up and runs it
uncompiled, at the speed of eager code, with one warning in the log.

Evidence
Dynamo's own records say which functions were compiled again, how long that took, and which guard failed.
There is a finding if dynamo gave up on a function, or if recompiling took at least 5 % of the steps after
warm-up, in at least two of them. Steps of arms do not count. The ceiling is measured: the same steps
without the time of those compilations, or uncompiled steps if those are faster still, because checking the
guards of many versions takes time too. A function that dynamo gave up on has no ceiling, because its compiled
form did not run.

Fix
Keep the value that changes out of the guards: a tensor instead of a Python number, `dynamic=True` for
lengths, and one `torch.compile` outside the loop.

```diff
-self.step += 1                                         # a Python number
+self.register_buffer("step", torch.zeros(()))           # in __init__
+self.step += 1
-model = torch.compile(model)
+model = torch.compile(model, dynamic=True)              # lengths that change
+torch._dynamo.mark_dynamic(batch, 0)                    # or only this dimension
```

Compile once, outside the loop. If `dynamic=True` is slower, pad lengths to a few sizes.

Fix safety
Reordered: code for any length may round differently from code for one.
"""

from __future__ import annotations

from flatout.doctor.ceilings import ceiling_of, share_of
from flatout.doctor.finding import Ceiling, Finding
from flatout.doctor.lines import training_call
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Compilation, CompiledFunction, Evidence

RULE = title_of(__doc__)
ARMS = ("compilation", "uncompiled")
EXPLAINS = ("FO603",)
TUNE = ("uncompiled", "drop-last")
LEAST_SHARE = 0.05  # of the steps after warm-up
FEWEST_STEPS = 2


def detect(evidence: Evidence) -> list[Finding]:
    compilation = evidence.compilation
    if compilation is None:
        return []
    return [
        _finding(evidence, compilation, function)
        for function in compilation.functions
        if function.gave_up or _again(function, compilation)
    ]


def _again(function: CompiledFunction, compilation: Compilation) -> bool:
    share = share_of(function.late_s, compilation.steps_s)
    return share is not None and share >= LEAST_SHARE and function.num_late_steps >= FEWEST_STEPS


def _finding(evidence: Evidence, compilation: Compilation, function: CompiledFunction) -> Finding:
    share = None if function.gave_up else share_of(function.late_s, compilation.steps_s)
    place = function.place or training_call(evidence)
    figures = [
        f"compiled {function.num_compiled} times, {show_seconds(function.compile_s)} in all",
        *(f"a guard failed: {reason}" for reason in function.reasons),
    ]
    if function.num_late_steps:
        figures.append(
            f"compiled again in {function.num_late_steps} of {compilation.num_steps} steps after warm-up, "
            f"for {show_seconds(function.late_s)} of {show_seconds(compilation.steps_s)}"
        )
    if function.gave_up:
        message = (
            f"torch.compile gave up on {function.function} after {function.num_compiled} versions: "
            "it runs uncompiled"
        )
    else:
        message = (
            f"{function.function} is compiled again and again: {show_share(share)} of the steps after warm-up"
        )
    return RULE.finding(
        place,
        message,
        figures=figures,
        share=share,
        ceiling=None if share is None else _ceiling(evidence, compilation, share),
        no_ceiling="its compiled form did not run, so its time is unknown" if share is None else None,
    )


def _ceiling(evidence: Evidence, compilation: Compilation, share: float) -> Ceiling:
    mean_s = compilation.steps_s / max(1, compilation.num_steps)
    speedup = 1 / (1 - share)
    as_written = evidence.counterfactual(ARMS[1])
    if as_written is not None and as_written.speedup_low > speedup:
        return ceiling_of(as_written, evidence)
    return Ceiling(step_s=mean_s / speedup, speedup=speedup, kind="compilation", job_speedup=speedup)
