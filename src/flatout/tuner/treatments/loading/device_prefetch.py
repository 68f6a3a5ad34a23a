"""Copy batches to the GPU on a stream of their own, before the loop asks for them.

The script's own copy then finds its tensors there and does nothing.  A script that reads its batches on the
host first raises or waits, and the trial shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value

LEAST_SHARE = 0.03  # of the step, in copies to the GPU
AHEAD = 2


def propose(case: Case) -> list[Value]:
    """Propose it on a GPU if copies of batches take a share of the step."""
    evidence = case.evidence
    step_s, transfer_s = case.own_step_s, evidence.phase_s("transfer") or 0.0
    if evidence.job.device != "cuda" or not step_s or not any(each.trains for each in evidence.loaders):
        return []
    copies = evidence.kernels.copies if evidence.kernels is not None else ()
    copied_s = sum(each.total_s for each in copies if each.kind.startswith("HtoD"))
    return [AHEAD] if max(transfer_s, copied_s) >= LEAST_SHARE * step_s else []


def install(patches: Patches, value: Value) -> None:
    import torch
    from torch.utils.data import DataLoader

    from flatout.data import prefetch

    class Plain:
        """A loader without our `__iter__`, which would call itself."""

        def __init__(self, real: Any, loader: Any) -> None:
            self._real, self._loader = real, loader

        def __iter__(self) -> Iterator[Any]:
            return iter(self._real(self._loader))

    @patches.around(DataLoader, "__iter__")
    def iterate(real: Any, loader: Any) -> Any:
        if not torch.cuda.is_initialized():  # the model is not on a GPU
            return real(loader)
        return iter(
            prefetch(Plain(real, loader), torch.device("cuda", torch.cuda.current_device()), ahead=int(value))
        )


TREATMENT = Treatment(
    propose,
    install,
    "copy batches to the GPU on a stream of their own, ahead of their use",
    safety="exact",
)
