"""Batches gathered from RaggedArrays, on the host or wholly on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from flatout.data.padding import Pad
from flatout.data.ragged_arrays import RaggedArrays
from flatout.decisions import Decision

Batch = dict[str, Tensor]


class DeviceDataset:
    """Batches on `device`, each one vectorised gather; no workers and no Python per sample.

    The arrays live on the GPU where they fit, else on the host; `placement` says which and why.  Batches
    come from a batch sampler (`TokenBudgetBatches`, `RowBatches`, or any iterable of index sequences), or
    are `batch_size` rows at random.  `form` is "padded" or "packed"; `transform` maps each batch.
    """

    placement: Decision[str]

    def __init__(
        self,
        arrays: RaggedArrays,
        *,
        device: torch.device | str,
        batches: Iterable[Any] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
        pads: Mapping[str, Pad] | None = None,
        form: Literal["padded", "packed"] = "padded",
        place: Literal["auto", "host", "device"] = "auto",
        transform: Callable[[Batch], Any] | None = None,
    ) -> None:
        raise NotImplementedError

    def gather(self, indices: Any) -> Batch:
        """The batch of these records, on `device`."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError
