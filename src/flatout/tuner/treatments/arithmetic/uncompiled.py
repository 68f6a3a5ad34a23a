"""Run functions that the script compiles as they are written.

A function whose guards fail in every step waits for the compiler again and again, and one that spends its
time in large products gains less than its guards cost.
"""

from __future__ import annotations

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value, reversible


def propose(case: Case) -> list[Value]:
    """Propose it if the job compiles anything, unless uncompiled steps were seen to gain nothing."""
    evidence = case.evidence
    seen = evidence.counterfactual("uncompiled")
    gains = seen is None or seen.speedup_high > 1
    return [True] if evidence.compilation is not None and gains else []


def install(patches: Patches, _value: Value) -> None:
    import torch
    from torch._dynamo import eval_frame

    patches.on_undo(lambda stance=eval_frame._stance.stance: torch.compiler.set_stance(stance))  # type: ignore[misc]
    torch.compiler.set_stance("force_eager")


TREATMENT = Treatment(
    propose,
    install,
    "run compiled functions as they are written",
    safety="reordered",
    redraws_masks=True,
    switch=reversible(install),
)
