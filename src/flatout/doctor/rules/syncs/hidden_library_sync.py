"""FO222 hidden-library-sync

What it does
Finds library calls that make the host wait for the GPU where your code does not show it.

Why it costs
A distribution that validates its arguments, a metric that checks its input for NaN, an attention mask that
checks whether it is all ones: each reads a number back from the GPU, and the queue of kernels runs dry
while the host waits. The library often has an argument that turns the check off.

Evidence
On a GPU: a line of your code calls a library that waits at least once per step, through `item`, `bool`,
`nonzero` or similar, and the profiler saw the GPU idle for at least 5 % of the step in gaps that follow a
wait. The finding names the library's own line. Waits of optimizers and gradient scalers are not counted.
There is no arm. `reads-free` answers a read with an earlier value only at lines of your own, whose source
shows whether the value becomes a size or an index. A library passes what it reads to other functions, as a
size, the end of a loop or a gradient's scale, so an earlier value could make it compute something else, or
fail.

Fix
Turn the check off:

```diff
-Categorical(logits=logits)
+Categorical(logits=logits, validate_args=False)           # torch.distributions
-MeanMetric()
+MeanMetric(nan_strategy="disable")                        # torchmetrics
-attention(q, k, v, mask=causal_mask)                      # the mask is read back
+attention(q, k, v, is_causal=True)
```

Fix safety
Exact: the same numbers, without the check.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding, by_argument
from flatout.doctor.lines import show_calls, show_ops
from flatout.doctor.rule import title_of
from flatout.doctor.rules.waits.sync_in_step import gaps_after_waits, waiting_lines, waits_for_the_gpu
from flatout.ground.units import show_share
from flatout.measure.evidence import Evidence

RULE = title_of(__doc__)
TUNE = ("causal-mask",)
EXPLAINS = ("FO202",)
LOOPS = ("transformers/trainer", "lightning/", "pytorch_lightning/")


def detect(evidence: Evidence) -> list[Finding]:
    waiting = [site for site in evidence.sites if waits_for_the_gpu(site)]
    own = {site.place for site in waiting if site.via is None}
    findings = []
    for line, share in waiting_lines(
        evidence, lambda site: site.via is not None and site.place not in own, least_calls=1
    ):
        vias = sorted({site.via for site in waiting if site.via and site.place == line.place})
        findings.append(
            RULE.finding(
                line.place,
                f"a library waits for the GPU {show_calls(line.calls_per_step)} times per step in this call "
                f"({show_ops(line)}); the GPU then idles for {show_share(share)} of the step",
                figures=(
                    *(f"it waits at {via}" for via in vias[:3]),
                    gaps_after_waits(evidence),
                ),
                share=share,
                ceiling=None,
                fix=_fix(evidence, vias),
                no_ceiling="what a library reads may decide what it does next, so its reads are left alone",
            )
        )
    return findings


def _fix(evidence: Evidence, vias: list[str]) -> str:
    """Choose the fix: a framework's own loop waits in order to log."""
    fix = "pass the argument that turns the library's check off, or call it less often"
    if not all(via.startswith(LOOPS) for via in vias):
        return fix
    return by_argument(
        evidence,
        fix,
        transformers="TrainingArguments(logging_nan_inf_filter=False), and a larger logging_steps=",
        lightning="Trainer(log_every_n_steps=) a larger number, or enable_progress_bar=False",
    )
