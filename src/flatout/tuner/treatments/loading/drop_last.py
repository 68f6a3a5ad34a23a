"""Drop the last batch of an epoch, which is smaller, so that shapes stay the same.

Compiled code and captured graphs are remade for every shape.  A shuffled loader drops other samples in every
epoch; a loader that does not shuffle would drop the same ones, so it stays unchanged.
"""

from __future__ import annotations

from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value


def propose(case: Case) -> list[Value]:
    """Propose it if code was recompiled after warm-up, or batches differed in size."""
    evidence = case.evidence
    compiled = evidence.compilation
    again = compiled is not None and any(each.num_late_steps for each in compiled.functions)
    sizes = {step.rows for step in evidence.kept("real") if step.rows is not None}
    return [True] if evidence.loaders and (again or len(sizes) > 1) else []


def install(patches: Patches, _value: Value) -> None:
    from torch.utils.data import DataLoader

    @patches.around(DataLoader, "__init__")
    def init(real: Any, loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) < 8 and _is_shuffled(dataset, *args, **kwargs):  # the ninth argument is drop_last
            kwargs["drop_last"] = True
        real(loader, dataset, *args, **kwargs)


def _is_shuffled(
    dataset: Any,
    batch_size: Any = 1,
    shuffle: Any = None,
    sampler: Any = None,
    batch_sampler: Any = None,
    *_: Any,
    **__: Any,
) -> bool:
    """Return whether batches have a fixed size, are shuffled, and at least one is complete."""
    if not batch_size or batch_sampler is not None or not (shuffle or sampler is not None):
        return False
    return hasattr(dataset, "__len__") and len(dataset) >= batch_size


TREATMENT = Treatment(
    propose,
    install,
    "leave out the last, smaller batch of an epoch",
    safety="lossy",
    changes_batches=True,
)
