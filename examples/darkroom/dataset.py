"""Training samples cut from learning histories, and the batches made of them.

A history is cut into regions of 80 transitions.  A sample is a moment in a history: the region before
(80 transitions, or none at the start), the current region up to that moment (0 to 79 transitions) and
the state the agent is in, the query.  The answer is the action the learner took there; at the last
moment of a region it is the region's end instead.  Samples therefore have 0 to 159 rows, 113 on average.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from histories import NUM_ACTIONS, Histories
from torch.utils.data import Dataset

REGION = 80
TRANSITION, REGION_START, REGION_END = range(3)  # token types
NO_ACTION = -1

Sample = dict[str, Any]
Batch = dict[str, Any]


class RegionDataset(Dataset[Sample]):
    """Every moment of every whole region of every history."""

    def __init__(self, histories: Histories) -> None:
        self.histories = histories
        self.num_regions = histories.num_steps // REGION

    def __len__(self) -> int:
        return len(self.histories) * self.num_regions * REGION

    def __getitem__(self, index: int) -> Sample:
        rest, position = divmod(index, REGION)
        history, region = divmod(rest, self.num_regions)
        previous_length = REGION if region > 0 else 0
        moment = region * REGION + position
        rows = slice(region * REGION - previous_length, moment)
        at_end = position == REGION - 1
        source = self.histories
        return {
            "states": source.states[history, rows].astype(np.float32),
            "actions": source.actions[history, rows].astype(np.int64),
            "rewards": source.rewards[history, rows].astype(np.float32),
            "next_states": source.next_states[history, rows].astype(np.float32),
            "query": source.states[history, moment].astype(np.int64),
            "previous_length": previous_length,
            "current_length": position,
            "target_type": REGION_END if at_end else TRANSITION,
            "target_action": NO_ACTION if at_end else int(source.actions[history, moment]),
        }


def collate(samples: list[Sample]) -> Batch:
    """Pad every sample to the longest one: states, rewards, ... become (batch, rows, ...) tensors."""
    longest = max(len(sample["states"]) for sample in samples)
    states_list, actions_list, rewards_list, next_states_list = [], [], [], []
    for sample in samples:
        states, actions = sample["states"], sample["actions"]
        rewards, next_states = sample["rewards"], sample["next_states"]
        padding = longest - len(states)
        if padding > 0:
            states = np.concatenate([states, np.zeros((padding, 2), dtype=np.float32)])
            actions = np.concatenate([actions, np.zeros(padding, dtype=np.int64)])
            rewards = np.concatenate([rewards, np.zeros(padding, dtype=np.float32)])
            next_states = np.concatenate([next_states, np.zeros((padding, 2), dtype=np.float32)])
        states_list.append(states)
        actions_list.append(actions)
        rewards_list.append(rewards)
        next_states_list.append(next_states)
    actions = torch.tensor(np.stack(actions_list))
    return {
        "states": torch.tensor(np.stack(states_list)),
        "actions": F.one_hot(actions, NUM_ACTIONS).float(),
        "rewards": torch.tensor(np.stack(rewards_list)),
        "next_states": torch.tensor(np.stack(next_states_list)),
        "query": torch.tensor(np.stack([sample["query"] for sample in samples])),
        "previous_length": [sample["previous_length"] for sample in samples],
        "current_length": [sample["current_length"] for sample in samples],
        "target_type": torch.tensor([sample["target_type"] for sample in samples]),
        "target_action": torch.tensor([sample["target_action"] for sample in samples]),
    }
