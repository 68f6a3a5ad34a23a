"""FO504 needless-checkpointing

What it does
Finds activation checkpointing in a job that has enough memory to keep its activations.

Why it costs
A checkpointed part of the model is computed twice: once in the forward, and again when the backward pass
reaches it. That is a quarter of the step if the whole model is checkpointed, and it saves memory that the
job does not need.

Evidence
The model calls `torch.utils.checkpoint`, and the peak memory, added once more for each checkpointed part,
fits into 80 % of the available memory: while a part is recomputed, all its activations exist at once. The
ceiling is measured: steps that keep their activations. If that bound does not fit, the job may need its
checkpoints, and there is no finding.

Fix
Call these parts without `torch.utils.checkpoint`:

```diff
-x = checkpoint(block, x, use_reentrant=False)
+x = block(x)
-model.gradient_checkpointing_enable()              # transformers
+model.gradient_checkpointing_disable()
```

`flatout plan` says which batch fits without checkpoints.

Fix safety
Exact: the same numbers are kept instead of recomputed.
"""

from __future__ import annotations

from flatout.doctor.ceilings import arm_at
from flatout.doctor.finding import Finding, by_argument
from flatout.doctor.lines import lines_of, show_calls
from flatout.doctor.rule import title_of
from flatout.ground.units import show_bytes
from flatout.measure.evidence import Evidence

ARMS = ("no-checkpointing",)
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True
TUNE = ("no-checkpointing",)


def detect(evidence: Evidence) -> list[Finding]:
    sites = [site for site in evidence.sites if site.kind == "call" and site.op == "checkpoint"]
    if not sites or arm_at(evidence, ARMS[0], None) is None:
        return []
    parts = lines_of(sites)
    peak = evidence.memory.peak_bytes if evidence.memory is not None else None
    return RULE.proven(
        evidence,
        parts[0].place,
        f"{show_calls(sum(part.calls_per_step for part in parts))} parts of the model are computed twice per "
        "step, although memory has room for their activations",
        figures=(
            f"checkpoint: {show_calls(parts[0].calls_per_step)} calls per step from this line",
            f"peak memory is {show_bytes(peak)}",
        ),
        fix=by_argument(
            evidence,
            RULE.fix,
            transformers="TrainingArguments(gradient_checkpointing=False)",
        ),
    )
