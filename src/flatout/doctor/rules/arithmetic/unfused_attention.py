"""FO404 unfused-attention

What it does
Finds attention written out as two products and a softmax, if one fused call is faster.

Why it costs
The scores of all queries and keys are written to memory, read, scaled and written again, masked and written
again, and once more for the softmax: length times length numbers for every head, each time. A fused kernel
computes them in pieces that never leave the chip. For short sequences, and in steps that wait for launches
or for the loader, it gains nothing, so this rule speaks only if a gain was measured.

Evidence
Flatout follows tensors from a product through scaling, masks and dropout to a softmax, and on to a product
with values. The ceiling is measured: steps in which `scaled_dot_product_attention` computes all of it, with
its own kernel for causal masks.

Fix
`F.scaled_dot_product_attention(q, k, v, is_causal=...)`:

```diff
-scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) + causal_mask
-out = scores.softmax(-1) @ v
+out = F.scaled_dot_product_attention(q, k, v, is_causal=True)    # q, k, v: batch x heads x length x width
```

In transformers: `from_pretrained(..., attn_implementation="sdpa")`.

Fix safety
Reordered: the same sum, computed in pieces.
"""

from __future__ import annotations

from flatout.doctor.ceilings import arm_at
from flatout.doctor.finding import Finding
from flatout.doctor.lines import lines_of, show_calls
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence

ARMS = ("fused-attention",)
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True


def detect(evidence: Evidence) -> list[Finding]:
    calls = [site for site in evidence.sites if site.kind == "call" and site.op == "attention"]
    if arm_at(evidence, ARMS[0], None) is None:
        return []
    findings = []
    for line in lines_of(calls)[:1]:  # one arm covers all of them
        number = show_calls(sum(site.calls_per_step for site in calls))
        findings += RULE.proven(
            evidence,
            line.place,
            f"attention is written out {number} times per step, as two products and a softmax",
            figures=(f"{show_calls(line.calls_per_step)} times per step at this line",),
        )
    return findings
