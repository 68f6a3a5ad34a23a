"""Keep batches in page-locked memory and copy them to the GPU without waiting."""

from __future__ import annotations

from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value


def propose(case: Case) -> list[Value]:
    """Propose it if batches are copied to a GPU from pageable memory."""
    evidence = case.evidence
    pageable = any(site.kind == "copy" and site.pinned is False for site in evidence.sites)
    return [True] if evidence.job.device == "cuda" and evidence.loaders and pageable else []


def install(patches: Patches, _value: Value) -> None:
    import torch
    from torch.utils.data import DataLoader

    real_to, real_cuda = torch.Tensor.to, torch.Tensor.cuda

    @patches.around(DataLoader, "__init__")
    def init(real: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) < 8:  # the ninth argument is pin_memory
            kwargs["pin_memory"] = True
        real(loader, *args, **kwargs)

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 3 and not tensor.is_cuda and tensor.is_pinned():
            kwargs.setdefault("non_blocking", True)
        return real_to(tensor, *args, **kwargs)

    def cuda(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 and not tensor.is_cuda and tensor.is_pinned():
            kwargs.setdefault("non_blocking", True)
        return real_cuda(tensor, *args, **kwargs)

    patches.replace(torch.Tensor, "to", to)
    patches.replace(torch.Tensor, "cuda", cuda)


TREATMENT = Treatment(
    propose,
    install,
    "keep batches in page-locked memory and copy them without waiting",
    safety="exact",
)
