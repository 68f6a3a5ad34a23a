"""FO309 sequential-variants

What it does
Finds models of equal shapes that are called one after another on batches of equal size.

Why it costs
Members of an ensemble, adapters on one base and trials of a search are the same arithmetic with different
weights. One after another, each launches its own kernels on a small part of the device. Stacked, one launch
serves them all.

Evidence
One line calls at least 4 modules with parameters of the same shapes, none of which takes another one's
result, and they hold at least 20 % of the step. There is no arm: what a model computes and trains has to
stay, and only stacking the models shows the gain.

Fix
Stack the models (`torch.func.stack_module_state`, `vmap`), or train them in one pass with `flatout adapt`
or `flatout evolve`:

```diff
-outputs = torch.stack([member(x) for member in members])
+weights, buffers = torch.func.stack_module_state(members)
+outputs = torch.func.vmap(run_one, in_dims=(0, 0, None))(weights, buffers, x)
```

To train many adapters on one base in one pass, use `flatout adapt`; for populations, use `flatout evolve`.

Fix safety
Reordered: the same products, summed in another order.
"""

from __future__ import annotations

from flatout.doctor.ceilings import counted_step_s, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.lines import show_calls
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence

RULE = title_of(__doc__)
FEWEST_VARIANTS = 4
LEAST_SHARE = 0.20


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for call in evidence.module_calls:
        share = share_of(call.host_s, counted_step_s(evidence))
        if call.num_alike < FEWEST_VARIANTS or call.rows is None or not call.has_parameters:
            continue
        if share is None or share < LEAST_SHARE:
            continue
        counted = show_seconds(counted_step_s(evidence))
        findings.append(
            RULE.finding(
                call.place,
                f"{call.num_alike} models {call.module} of equal shapes are called one after the other: "
                f"{show_share(share)} of the step",
                figures=(
                    f"{show_calls(call.calls_per_step)} calls per step with {call.rows} rows each",
                    f"{show_seconds(call.host_s)} of a counted step of {counted}, without the backward",
                ),
                share=share,
                ceiling=None,
                no_ceiling="what the models compute has to stay, and only stacking them shows what is saved",
            )
        )
    return findings
