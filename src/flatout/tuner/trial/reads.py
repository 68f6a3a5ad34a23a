"""What else can go wrong unseen: batches, values that the script reads, steps that a scaler skips.

A correctly computed loss may still be read a step late, and a loader may serve a batch twice.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection
from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.trial.hashes import hash_of_batch

MOST_READS = 20_000
MOST_BATCHES = 1_000


class Reads:
    """Watches loaders, scalars and scalers in the job's process."""

    def __init__(self, checked: Collection[int], *, all_batches: bool = False) -> None:
        self.checked = frozenset(checked)
        self._most_batches = MOST_BATCHES if all_batches else 0
        self.batches: dict[str, str] = {}  # hashes, by "loader.batch", both from 1
        self.scalars: list[float] = []
        self._found_inf: list[Any] = []
        self._datasets: list[Any] = []  # of the loaders; a loader may be rebuilt for every epoch
        self._num_batches: Counter[int] = Counter()

    @property
    def num_skipped(self) -> int:
        return sum(bool(each) for each in self._found_inf)

    def install(self, torch: Any, patches: Patches) -> None:
        self._watch_loaders(patches)
        self._watch_scalars(torch, patches)
        self._watch_scalers(torch, patches)

    def _watch_loaders(self, patches: Patches) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        real = _BaseDataLoaderIter.__next__

        def next_batch(iterator: Any) -> Any:
            batch = real(iterator)
            loader = self._number_of(iterator._dataset)
            self._num_batches[loader] += 1
            number = self._num_batches[loader]
            if number in self.checked or number <= self._most_batches:
                self.batches[f"{loader}.{number}"] = hash_of_batch(batch)
            return batch

        patches.replace(_BaseDataLoaderIter, "__next__", next_batch)

    def _number_of(self, dataset: Any) -> int:
        for number, known in enumerate(self._datasets, 1):
            if known is dataset:
                return number
        self._datasets.append(dataset)
        return len(self._datasets)

    def _watch_scalars(self, torch: Any, patches: Patches) -> None:
        """Record what the script gets from `item()` and `float()`, but not torch's own reads."""
        inside = os.path.join(os.path.dirname(torch.__file__), "")
        shown = os.path.join(inside, "_tensor.py")  # a tensor in an f-string

        for name in ("item", "__float__"):
            real = getattr(torch.Tensor, name)

            def read(tensor: Any, real: Any = real) -> Any:
                value = real(tensor)
                caller = sys._getframe(1).f_code.co_filename
                if (not caller.startswith(inside) or caller == shown) and len(self.scalars) < MOST_READS:
                    self.scalars.append(float(value) if isinstance(value, (int, float)) else 0.0)
                return value

            patches.replace(torch.Tensor, name, read)

    def _watch_scalers(self, torch: Any, patches: Patches) -> None:
        scalers = torch.amp.GradScaler
        real = scalers.update

        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            for state in scaler._per_optimizer_states.values():
                found = [each.detach().clone() for each in state["found_inf_per_device"].values()]
                if found:
                    self._found_inf.append(sum(found))
            return real(scaler, *args, **kwargs)

        patches.replace(scalers, "update", update)
