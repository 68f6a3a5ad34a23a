"""Set how many threads a CPU operator uses."""

from __future__ import annotations

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value, reversible


def propose(case: Case) -> list[Value]:
    """Propose, on a CPU, one thread for operators too small to share, or all cores."""
    evidence = case.evidence
    cores = round(evidence.host.cores or 1)
    return [] if evidence.job.device != "cpu" or cores < 2 else [1, cores]


def install(patches: Patches, value: Value) -> None:
    import torch

    before = torch.get_num_threads()
    patches.on_undo(lambda: torch.set_num_threads(before))
    torch.set_num_threads(int(value))


TREATMENT = Treatment(
    propose,
    install,
    "let an operator on the CPU use this many threads",
    safety="reordered",
    switch=reversible(install),
    suits_any=True,
)
