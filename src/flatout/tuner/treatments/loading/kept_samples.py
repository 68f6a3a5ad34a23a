"""Keep the samples of a small dataset in memory, from its second epoch on.

A dataset that decodes or counts when a sample is fetched does so again in every epoch.  Its samples may be
kept if they are always the same.  So fetching one must not draw random numbers, and the first samples of
every epoch are fetched again: if one differs from what was kept, nothing is kept any more.  The script gets
copies, which it may change.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value

LEAST_FETCH = 0.2  # of the step
FETCHED_AGAIN = 8  # samples of each epoch
MEMORY_SHARE = 0.25  # of what is free
OBJECT_BYTES = 100
PLAIN = (int, float, bool, str, bytes, type(None))


class _CannotBeKept(Exception):
    """A sample holds something whose copy is not known to be one."""


def propose(case: Case) -> list[Value]:
    """Propose it if fetching takes long in the training process, and trials reach the second epoch."""
    from flatout.tuner.search.plan import plan_of, steps_of

    evidence = case.evidence
    loaders = [loader for loader in evidence.loaders if loader.trains]
    epoch_steps, step_s = steps_of(evidence), evidence.step_s
    if len(loaders) != 1 or not epoch_steps or not step_s or 2 * epoch_steps > plan_of(step_s).num_steps:
        return []
    (loader,) = loaders
    if loader.num_workers != 0 or loader.streams or loader.takes_many or loader.fetch_s is None:
        return []
    per_step = max((step.num_batches for step in evidence.steps), default=1)
    return [True] if per_step * loader.fetch_s.mean_s >= LEAST_FETCH * step_s else []


class _Samples:
    """The samples of one dataset."""

    def __init__(self, dataset: Any, *, most_bytes: float) -> None:
        self.dataset, self._left_bytes = dataset, most_bytes
        self._kept: dict[Any, Any] = {}
        self._is_over = False
        self._reader: Any = None  # of this epoch
        self._unsure = 0  # samples to fetch again

    def fetch(self, reader: Any, index: Any) -> Any:
        """Return a sample for the reader of an epoch."""
        if reader is not self._reader:
            self._reader, self._unsure = reader, FETCHED_AGAIN
        if self._is_over:
            return self.dataset[index]
        if index not in self._kept:
            return self._fetch_first(index)
        if not self._unsure:
            return _copy(self._kept[index])
        self._unsure -= 1
        sample = self.dataset[index]
        if not _equal(sample, self._kept[index]):
            self._end()
        return sample

    def _fetch_first(self, index: Any) -> Any:
        before = _random_states()
        sample = self.dataset[index]
        try:
            size = sum(map(_bytes_of, _leaves(sample)))
            if not _equal(before, _random_states()):
                self._end()
            elif size <= self._left_bytes:
                self._kept[index] = _copy(sample)
                self._left_bytes -= size
        except _CannotBeKept:
            self._end()
        return sample

    def _end(self) -> None:
        self._is_over, self._kept = True, {}


def install(patches: Patches, _value: Value) -> None:
    import psutil
    from torch.utils.data import get_worker_info
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    most_bytes = (
        MEMORY_SHARE * psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    known: dict[int, _Samples] = {}

    @patches.around(_MapDatasetFetcher, "fetch")
    def fetch(real: Any, reader: Any, indices: Any) -> Any:
        takes_many = getattr(reader.dataset, "__getitems__", None)
        if not reader.auto_collation or takes_many or get_worker_info() is not None:
            return real(reader, indices)
        samples = known.get(id(reader.dataset))
        if samples is None:
            samples = known[id(reader.dataset)] = _Samples(
                reader.dataset, most_bytes=most_bytes / (len(known) + 1)
            )
        return reader.collate_fn([samples.fetch(reader, index) for index in indices])


def _random_states() -> list[Any]:
    import numpy as np
    import torch

    return [torch.get_rng_state(), *np.random.get_state(legacy=True), random.getstate()]


def _leaves(value: Any) -> Iterable[Any]:
    if type(value) in (tuple, list):
        for each in value:
            yield from _leaves(each)
    elif type(value) is dict:
        for each in value.values():
            yield from _leaves(each)
    else:
        yield value


def _bytes_of(leaf: Any) -> int:
    return OBJECT_BYTES + int(getattr(leaf, "nbytes", 0))


def _copy(value: Any) -> Any:
    """Copy a sample, so that nothing the script does to one changes the other."""
    import numpy as np
    import torch

    kind = type(value)
    if kind in PLAIN or isinstance(value, np.generic):
        return value
    if kind is torch.Tensor and not value.requires_grad and value.layout == torch.strided:
        return value.clone()
    if kind is np.ndarray and value.dtype != object:
        return value.copy()
    if kind in (tuple, list):
        return kind(map(_copy, value))
    if kind is dict:
        return {name: _copy(each) for name, each in value.items()}
    raise _CannotBeKept


def _equal(one: Any, other: Any) -> bool:
    import numpy as np
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(each, other[name]) for name, each in one.items())
    return bool(one == other)


TREATMENT = Treatment(
    propose,
    install,
    "keep samples in memory from the second epoch on",
    safety="exact",
    begins_late=True,
)
