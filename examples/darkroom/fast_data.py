"""The samples of `RegionDataset` as spans of one flat array, drawn by the device itself.

A sample is a moment of a history, and its rows are the steps just before it: a span of the flat array of
all steps.  So no sample is ever cut out and copied.  The full job, 7300 histories of 1000 steps with
7 million samples, lies on the GPU as it is; a batch is two gathers there, one for the rows and one for the
facts about each sample.  The order of an epoch lies there too, with a cursor in it, so that drawing a
batch asks the host for nothing and a CUDA graph can hold it.

`ShuffledBatches` draws each sample once per epoch in random order, as the DataLoader of `train.py` does,
except that what does not fill a batch at an epoch's end is left out.  With `num_shards`, ranks draw
different samples of one order; without, every rank draws the same ones, which is what a loader does that
a distributed wrapper did not find.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from dataset import NO_ACTION, REGION, REGION_END, TRANSITION, Batch
from histories import GRID, NUM_ACTIONS, Histories
from numpy.typing import NDArray
from torch import Tensor

from flatout.data import DeviceDataset, Pad, RaggedArrays
from flatout.errors import BadInput

MOST_ROWS = 2 * REGION - 1
FACTS = ("cell", "previous_length", "current_length", "target_type", "target_action")


def moments(histories: Histories) -> RaggedArrays:
    """Every sample of `RegionDataset(histories)`, under the same number."""
    num_regions = histories.num_steps // REGION
    shape = (len(histories), num_regions, REGION)
    history, region, position = (axis.ravel() for axis in np.indices(shape, dtype=np.int32))
    previous_length = np.where(region > 0, REGION, 0)
    moment = history.astype(np.int64) * histories.num_steps + region * REGION + position
    at_end = position == REGION - 1
    states, actions = histories.states.reshape(-1, 2), histories.actions.reshape(-1)
    facts = {
        "cell": states[moment] @ np.array([GRID, 1], dtype=np.int8),
        "previous_length": previous_length,
        "current_length": position,
        "target_type": np.where(at_end, REGION_END, TRANSITION),
        "target_action": np.where(at_end, NO_ACTION, actions[moment]),
    }
    return RaggedArrays(
        {
            "transitions": transition_rows(histories),
            "facts": np.stack([facts[name].astype(np.int8) for name in FACTS], axis=1),
        },
        spans={"transitions": (moment - position - previous_length, previous_length + position)},
    )


def transition_rows(histories: Histories) -> NDArray[np.int8]:
    """One row per step, as the model reads it: state, one-hot action, reward, next state."""
    one_hot = np.eye(NUM_ACTIONS, dtype=np.int8)[histories.actions]
    columns = [histories.states, one_hot, histories.rewards[..., None], histories.next_states]
    rows: NDArray[np.int8] = np.concatenate(columns, axis=-1)
    return rows.reshape(-1, rows.shape[-1])


def resident(histories: Histories, *, device: torch.device | str) -> DeviceDataset:
    """The samples on `device`; every batch is as long as the longest sample there is."""
    same_shape = Pad(dtype=torch.float32, multiple=MOST_ROWS, max_length=MOST_ROWS)
    return DeviceDataset(moments(histories), device=device, pads={"transitions": same_shape})


def batch_of(dataset: DeviceDataset, indices: Any) -> Batch:
    """The batch of these samples, as `FastDarkroom` reads it."""
    gathered = dataset.gather(indices)
    facts = dict(zip(FACTS, gathered["facts"].long().unbind(1), strict=True))
    return {"transitions": gathered["transitions"], **facts}


class ShuffledBatches:
    """Endless batches of `rows` samples, each sample once per epoch, drawn without the host."""

    def __init__(
        self,
        dataset: DeviceDataset,
        *,
        num_samples: int,
        rows: int,
        device: torch.device | str,
        seed: int,
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        self.steps_per_epoch = num_samples // (rows * num_shards)
        if self.steps_per_epoch < 1:
            raise BadInput(
                f"a batch of {rows} samples on each of {num_shards} ranks needs {rows * num_shards};"
                f" the data has {num_samples}",
                hint="a smaller --batch-size, or more --goals or --histories",
            )
        self._dataset = dataset
        self._generator = torch.Generator(device).manual_seed(seed)
        self._order = torch.empty(num_samples, dtype=torch.int64, device=device)
        self._advance = rows * num_shards
        self._cursor = torch.zeros((), dtype=torch.int64, device=device)
        self._mine = torch.arange(rows, device=device) + rows * shard
        self._drawn = self.steps_per_epoch

    def before_step(self) -> None:
        """Shuffle anew when the epoch is used up; outside a graph, once per step."""
        if self._drawn == self.steps_per_epoch:
            torch.randperm(len(self._order), generator=self._generator, out=self._order)
            self._cursor.zero_()
            self._drawn = 0
        self._drawn += 1

    def draw(self) -> Batch:
        """The batch at the cursor; the cursor moves on."""
        indices = self._order[self._mine + self._cursor]
        self._cursor += self._advance
        return batch_of(self._dataset, indices)

    def indices(self) -> Tensor:
        """The samples that `draw` would return."""
        return self._order[self._mine + self._cursor]
