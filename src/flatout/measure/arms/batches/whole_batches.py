"""Steps that take each batch from the dataset at once, by all its indices together.

A DataLoader asks a map-style dataset for its samples one by one and then collates them.  If the samples are
rows in memory, that is hundreds of calls for what one gather does.  The arm tries whether the dataset accepts
all indices: `dataset[indices]` must give exactly the batch that the loader collates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.arms.batches.workers import LEAST_SHARE, Again, StandIn, random_numbers_kept
from flatout.measure.evidence import Place
from flatout.measure.loading.loaders import LoaderWatch

FEWEST_ROWS = 8
NUM_TRIED = 2  # batches that must be equal


class WholeBatches(StandIn):
    """Batches of the training loader, each taken by one index."""

    kind = label = "whole-batches"

    def __init__(self, loaders: LoaderWatch, *, suspicion: float, place: Place | None) -> None:
        super().__init__(loaders, suspicion=suspicion, place=place)
        self._dataset: Any = None
        self._indices: Iterator[Any] = iter(())

    def _start(self, loader: Any) -> None:
        with random_numbers_kept():
            try:
                again = Again(loader).batches
                self._dataset, batches = _by_indices(loader.dataset, again)
                self._indices = itertools.cycle(batches)
                for samples, indices in zip(again[:NUM_TRIED], batches, strict=False):
                    collated = loader.collate_fn([loader.dataset[sample] for sample in samples])
                    if not _are_equal(_tensors(self._dataset[indices]), collated):
                        self.refusal = "a batch that is taken at once differs from the one that is collated"
            except Exception as error:  # noqa: BLE001 - the dataset's own, which was made for one index
                self.refusal = f"its samples cannot be taken all at once: {type(error).__name__}"

    def _next(self) -> Any | None:
        return _tensors(self._dataset[next(self._indices)])


def _by_indices(dataset: Any, batches: Iterable[Any]) -> tuple[Any, list[Any]]:
    """Return the dataset that holds the samples, and an index array for each batch."""
    import numpy as np
    from torch.utils.data import Subset

    indices = [np.asarray(samples) for samples in batches]
    while isinstance(dataset, Subset):
        own = np.asarray(dataset.indices)
        dataset, indices = dataset.dataset, [own[each] for each in indices]
    return dataset, indices


def _tensors(taken: Any) -> Any:
    """Convert what a dataset gave for many indices to the form that the default collate function makes."""
    import torch

    if isinstance(taken, (tuple, list)):
        return [_tensors(each) for each in taken]
    if isinstance(taken, dict):
        return {name: _tensors(each) for name, each in taken.items()}
    return torch.as_tensor(taken)


def _are_equal(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, list):
        same = isinstance(other, (list, tuple)) and len(one) == len(other)
        return same and all(map(_are_equal, one, other))
    if isinstance(one, dict):
        same = isinstance(other, dict) and one.keys() == other.keys()
        return same and all(_are_equal(one[name], other[name]) for name in one)
    return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose the arm if the step waits for a map-style dataset with the default collate function."""
    from torch.utils.data import default_collate

    record = context.loaders.trained_on()
    loader = record.loader() if record is not None and record.loader is not None else None
    if record is None or loader is None or record.config.get("streams") or loader.batch_sampler is None:
        return
    share = min(1.0, context.phases_s.get("wait", 0.0) / context.step_s)
    is_small = (record.config["batch_size"] or FEWEST_ROWS) < FEWEST_ROWS
    one_by_one = loader.collate_fn is default_collate and not record.config["takes_many"]
    if share >= LEAST_SHARE and one_by_one and not is_small:
        yield WholeBatches(context.loaders, suspicion=share, place=record.place)
