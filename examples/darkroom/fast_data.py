"""The samples of `RegionDataset` as spans of one flat array, gathered where they are used.

A sample is a moment of a history, and its rows are the steps just before it: a span of the flat array of
all steps.  So no sample is ever cut out and copied.  The full job, 7300 histories of 1000 steps with
7 million samples, takes some 200 MB and lies on the GPU; a batch is two gathers there, one for the rows
and one for the facts about each sample, and only the numbers of its samples travel.

Each sample is drawn once per epoch in random order, as the DataLoader of `train.py` does, except that
what does not fill a batch at an epoch's end is left out.  With `num_shards`, ranks draw different samples
of one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from dataset import NO_ACTION, REGION, REGION_END, TRANSITION, Batch
from histories import GRID, NUM_ACTIONS, Histories
from numpy.typing import NDArray

from flatout.data import DeviceDataset, Pad, RaggedArrays, RowBatches

MOST_ROWS = 2 * REGION - 1
FACTS = ("cell", "previous_length", "current_length", "target_type", "target_action")


def moments(histories: Histories) -> RaggedArrays:
    """Every sample of `RegionDataset(histories)`, under the same number."""
    return _moments(histories, np.arange(REGION))


def last_moments(histories: Histories) -> RaggedArrays:
    """One sample per region, its last: the one that shows all of it."""
    return _moments(histories, np.array([REGION - 1]))


def _moments(histories: Histories, positions: NDArray[Any]) -> RaggedArrays:
    num_regions = histories.num_steps // REGION
    grid = np.meshgrid(np.arange(len(histories)), np.arange(num_regions), positions, indexing="ij")
    history, region, position = (axis.ravel() for axis in grid)
    previous_length = np.where(region > 0, REGION, 0)
    moment = history * histories.num_steps + region * REGION + position
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


def batches_on(
    samples: RaggedArrays,
    *,
    device: torch.device | str,
    batch_size: int,
    seed: int,
    one_shape: bool = False,
    shard: int = 0,
    num_shards: int = 1,
) -> DeviceDataset:
    """Shuffled batches as `FastDarkroom` reads them.

    They are as long as their longest sample, or with `one_shape` all as long as the longest there is.
    """
    order = RowBatches(
        len(samples), rows=batch_size, drop_last=True, seed=seed, rank=shard, num_ranks=num_shards
    )
    pad = Pad(dtype=torch.float32, multiple=MOST_ROWS if one_shape else 1, max_length=MOST_ROWS)
    return DeviceDataset(
        samples, device=device, batches=order, pads={"transitions": pad}, transform=named_facts
    )


def named_facts(gathered: dict[str, Any]) -> Batch:
    facts = gathered["facts"].long().unbind(1)
    return {"transitions": gathered["transitions"], **dict(zip(FACTS, facts, strict=True))}


def endless(batches: DeviceDataset) -> Iterator[Batch]:
    """Batches for ever, epoch after epoch, each shuffled anew."""
    while True:
        yield from batches
