"""Change the batches that a cached block serves, for one block, and restore them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from flatout.measure.batches import KeptBatch, num_rows
from flatout.measure.loading.loader_records import LoaderRecord
from flatout.measure.loading.loaders import LoaderWatch


class ServedBatches:
    """The kept batches of the training loader."""

    def __init__(self, loaders: LoaderWatch) -> None:
        self._loaders = loaders
        self._record: LoaderRecord | None = None
        self._kept: deque[KeptBatch] | None = None

    def begin(self) -> list[Any]:
        """Return the batches that this block serves."""
        self._record = self._loaders.trained_on()
        return [each.batch for each in self._record.kept] if self._record is not None else []

    @property
    def are_copied(self) -> bool:
        """Whether the script gets copies, because it changes its batches in place."""
        return self._record is not None and self._record.copies

    def replace(self, batches: Iterable[Any]) -> None:
        """Serve these batches in place of the kept ones."""
        record = self._record
        if record is None:
            return
        self._kept, size = record.kept, record.config["batch_size"]
        changed = (KeptBatch(batch, rows=num_rows(batch, size), copies=record.copies) for batch in batches)
        record.kept = deque(changed, maxlen=self._kept.maxlen)

    def end(self) -> None:
        if self._record is not None and self._kept is not None:
            self._record.kept = self._kept
        self._record = self._kept = None
