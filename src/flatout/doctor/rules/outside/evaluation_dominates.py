"""FO801 evaluation-dominates

What it does
Finds evaluations that take a tenth of the job or more. They run between training steps, so no step shows
them.

Why it costs
Nothing trains meanwhile. Evaluating the whole held-out set every few hundred steps easily takes longer than
those steps, and evaluation often runs with small batches, with gradients on, in one process.

Evidence
Steps that take several times as long as usual are examined: stack samples of the training thread, about 25
per second over the whole run, name the outermost line that no typical step has on its stack. The share is
of the job's time after set-up, spread over the steps in which it was seen, or over an epoch if it recurs
every epoch. The ceiling is the speed-up of the job if that time cost nothing.

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

from flatout.doctor.outside import ARMS as ARMS
from flatout.doctor.outside import outside_rule

TUNE = ("no-grad-evaluation",)
detect = outside_rule(
    __doc__,
    "evaluation",
    what="evaluates between training steps",
    transformers="TrainingArguments(eval_steps=) a larger number, and a larger per_device_eval_batch_size",
    lightning="Trainer(check_val_every_n_epoch=) a larger number, or limit_val_batches= a smaller one",
)
