"""Set how many batches each worker has ready: more of them bridge occasional slow samples."""

from __future__ import annotations

from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value
from flatout.tuner.treatments.loading.loader_workers import LEAST_WAIT

UNEVEN = 2.0  # slow waits over the mean wait: a queue evens out only what varies


def propose(case: Case) -> list[Value]:
    """Propose it if there are workers, the step still waits for them, and some waits are much longer."""
    evidence = case.evidence
    wait_s, step_s = evidence.phase_s("wait"), evidence.step_s
    if not wait_s or not step_s or wait_s < LEAST_WAIT * step_s:
        return []
    for loader in evidence.loaders:
        waits = loader.wait_s
        if loader.trains and loader.num_workers and waits and waits.p95_s > UNEVEN * waits.mean_s:
            now = loader.prefetch_factor or 2
            return [count for count in (4, 8) if count > now]
    return []


def install(patches: Patches, value: Value) -> None:
    from torch.utils.data import DataLoader

    @patches.around(DataLoader, "__init__")
    def init(real: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        real(loader, *args, **kwargs)
        if loader.num_workers:  # whoever set the number
            loader.prefetch_factor = int(value)


TREATMENT = Treatment(
    propose,
    install,
    "let each worker have this many batches ready",
    safety="exact",
)
