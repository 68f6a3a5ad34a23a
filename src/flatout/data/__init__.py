"""The data path: from records on disk to batches on the GPU, so that the GPU never waits.

PadCollate            ragged samples into padded batches, one copy per field
TokenBudgetBatches    batches by tokens instead of rows: bucketed, shuffled, sharded, resumable
RowBatches            the same for batches of a fixed number of rows
RaggedArrays          ragged records in flat memory-mapped arrays, gathered many at once
DeviceDataset         batches gathered from RaggedArrays, on the host or wholly on the GPU
prefetch              batches copied to the GPU ahead of their use
choose_workers        the number of loader workers, measured
ragged                sequences built from pieces of varying length, as one gather

They lie in collate, batching, ragged_arrays, device_dataset, prefetch, workers and ragged; how they pad,
gather and store rows is in rows/.
"""

from __future__ import annotations

from flatout.data import ragged
from flatout.data.batching import RowBatches, TokenBudgetBatches
from flatout.data.collate import PadCollate
from flatout.data.device_dataset import DeviceDataset
from flatout.data.prefetch import prefetch
from flatout.data.ragged_arrays import RaggedArrays
from flatout.data.rows.padding import Pad, Padded
from flatout.data.workers import choose_workers

__all__ = [
    "DeviceDataset",
    "Pad",
    "PadCollate",
    "Padded",
    "RaggedArrays",
    "RowBatches",
    "TokenBudgetBatches",
    "choose_workers",
    "prefetch",
    "ragged",
]
