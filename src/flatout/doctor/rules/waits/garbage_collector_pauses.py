"""FO203 garbage-collector-pauses

What it does
Finds jobs that Python's garbage collector holds up, either on its own or through `gc.collect()`. A call of
`gc.collect()` in the training loop is the usual case.

Why it costs
A full collection walks every object of the process, a million or more if a dataset or a tokenizer is held
in Python lists, and nothing else runs meanwhile. In a job of several ranks, all wait for the one that
collects: in a public report, 27 collections took 7.6 s of 20 steps.

Evidence
The collector announces each collection: together they take at least 5 % of the time of ordinary steps. The
ceiling is measured: steps without collections. If the collector runs by itself in most steps, such steps
must be faster. Pauses that come once in many steps fall into some blocks of steps and not into others:
their share is shown without a ceiling, and only if no other measured cause costs as much, because fixing
that cause also creates fewer objects. Collections in a step that compiles are part of the cost of
compiling.

Fix
Remove calls of `gc.collect()` from the loop. If the collector runs by itself, run it less often:

```diff
+gc.collect(); gc.freeze()       # what set-up made is not looked at again
+gc.disable()
 for step, batch in enumerate(loader):
     train_step(batch)
-    gc.collect()
+    if step % 100 == 0:
+        gc.collect()
```

`flatout tune` tries that as the treatment `garbage-every`.

Fix safety
Exact: only reference cycles live longer. Watch the host's memory if the job creates many of them.
"""

from __future__ import annotations

from flatout.doctor.ceilings import prove, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence, Garbage

RULE = title_of(__doc__)
ARMS = ("garbage-off",)
TUNE = ("garbage-every",)
LEAST_SHARE = 0.05
ASKED = 0.5  # of the pauses, by calls of gc.collect
OFTEN = 0.5  # of the steps: rarer pauses hit some blocks of steps and miss others
FEWEST_STEPS = 4
FEWEST_PAUSES = 2  # steps with pauses, if these are rare: a single one does not show how often they come


def detect(evidence: Evidence) -> list[Finding]:
    garbage = evidence.garbage
    if garbage is None or garbage.num_steps < FEWEST_STEPS:
        return []
    share = share_of(garbage.pauses_s, garbage.steps_s)
    if share is None or share < LEAST_SHARE:
        return []
    asked = garbage.asked_s >= ASKED * garbage.pauses_s
    # a requested collection also leaves cold caches, which no pause shows
    proof = prove(evidence, ARMS, observed_share=None if asked else share)
    rare = FEWEST_PAUSES <= garbage.num_paused < OFTEN * garbage.num_steps
    if proof.refuted or (proof.ceiling is None and not asked and not rare):
        return []
    return [
        RULE.finding(
            garbage.place if asked else None,
            f"{'gc.collect() is called here and' if asked else 'the garbage collector'} holds the job up for "
            f"{show_share(share)} of its time",
            figures=_figures(garbage),
            share=share,
            ceiling=proof.ceiling,
            fix="remove gc.collect() from the training loop"
            if asked
            else "freeze the collector after set-up, and collect every 100 steps (gc.freeze, gc.disable)",
            no_ceiling=proof.reason,
        )
    ]


def explains_pauses(finding: Finding, other: Finding) -> bool:
    """Return whether `other` was measured to cost as much as unmeasured pauses: it may make the garbage."""
    if finding.code != RULE.code or finding.ceiling or finding.place or other.ceiling is None:
        return False
    return 1 - 1 / other.ceiling.speedup >= (finding.share or 0.0)


def _figures(garbage: Garbage) -> list[str]:
    pauses = f"{show_seconds(garbage.pauses_s)} in {garbage.num_steps} steps"
    return [
        f"collecting took {pauses}, most of it in {garbage.num_paused} of them",
        f"those steps took {show_seconds(garbage.steps_s)}",
    ]
