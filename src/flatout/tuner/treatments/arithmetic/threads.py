"""Set how many threads a CPU operator uses, also where the script sets another number."""

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

    set_threads, asked = torch.set_num_threads, torch.get_num_threads()

    def note(num_threads: int) -> None:
        nonlocal asked
        asked = num_threads

    patches.on_undo(lambda: set_threads(asked))
    patches.replace(torch, "set_num_threads", note)
    set_threads(int(value))


TREATMENT = Treatment(
    propose,
    install,
    "let an operator on the CPU use this many threads",
    safety="reordered",
    switch=reversible(install),
    suits_any=True,
)
