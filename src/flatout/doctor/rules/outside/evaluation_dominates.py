"""FO801 evaluation-dominates

What it does
Finds evaluations that take a tenth of the job or more, between training steps or in every one.

Why it costs
Nothing trains meanwhile. Evaluating the whole held-out set every few hundred steps easily takes longer than
those steps, and evaluation often runs with small batches, with gradients on, in one process.

Evidence
Steps that take several times as long as usual are examined: stack samples of the training thread, about 25
per second over the whole run, name the outermost line that no typical step has on its stack. The share is
of the job's time after set-up, spread over the steps in which it was seen, or over an epoch if it recurs
every epoch. The ceiling is the speed-up of the job if that time cost nothing.

If an epoch is one step, as on a graph, every step may hold an evaluation: a call in evaluation mode that no
backward pass reaches, of a model that another call trains. Then the ceiling is measured: steps without that
call. Functions that act or generate are left out, because training needs what they return.

Fix
Evaluate less often or on a part of the set, in larger batches and under `torch.inference_mode()`:

```diff
-@torch.no_grad()
+@torch.inference_mode()
 def evaluate(model, loader):        # a batch several times the training one: no gradients are kept
     ...

-if step % 500 == 0:
-    evaluate(model, whole_loader)
+if step % 5000 == 0:
+    evaluate(model, quick_loader)   # a few thousand samples; the whole set at the end of an epoch
```

Fix safety
Lossy: training stays the same, but the curve has fewer or noisier points, and early stopping depends on it.
"""

from __future__ import annotations

from flatout.doctor import outside
from flatout.doctor.ceilings import counted_step_s, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds
from flatout.measure.evidence import ROLLS_OUT, Evidence

TUNE = ("no-grad-evaluation",)
RULE = title_of(__doc__)
PROOF = ("knock-out",)
ARMS = (*outside.ARMS, *PROOF)
between_steps = outside.outside_rule(
    __doc__,
    "evaluation",
    what="evaluates between training steps",
    transformers="TrainingArguments(eval_steps=) a larger number, and a larger per_device_eval_batch_size",
    lightning="Trainer(check_val_every_n_epoch=) a larger number, or limit_val_batches= a smaller one",
)


def detect(evidence: Evidence) -> list[Finding]:
    return [*between_steps(evidence), *_in_every_step(evidence)]


def _in_every_step(evidence: Evidence) -> list[Finding]:
    counted_s = counted_step_s(evidence)
    counted = show_seconds(counted_s)
    findings: list[Finding] = []
    for call in evidence.module_calls:
        if not call.evaluates or ROLLS_OUT.search(call.place.function or ""):
            continue
        findings += RULE.proven(
            evidence,
            call.place,
            f"{call.module} is evaluated here in every step, in addition to its training",
            arms=PROOF,
            figures=(
                "it runs in evaluation mode, and no backward pass follows",
                f"{show_seconds(call.host_s)} of a step of {counted} while calls were counted",
            ),
            share=share_of(call.host_s, counted_s),
        )
    return [found for found in findings if found.ceiling is not None and _freed(found) >= outside.LEAST_SHARE]


def _freed(finding: Finding) -> float:
    return 0.0 if finding.ceiling is None else 1 - 1 / finding.ceiling.speedup
