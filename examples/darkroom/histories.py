"""Learning histories of the Darkroom, a 9x9 grid world whose goal is invisible.

The agent starts in the middle of the grid and knows only its own cell; standing on the goal pays 1 per
step, and after 20 steps it is put back in the middle.  A learning history is one agent's life on one
goal, from ignorance to mastery: here a scripted learner that acts at random with probability epsilon
and walks to the goal otherwise.  Epsilon falls from 1 to 0 over the first half of the history; the
second half is mastery.  A sequence model that imitates such histories must find out from past rewards
where the goal is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GRID = 9
START = GRID // 2
EPISODE_STEPS = 20
MOVES = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)], dtype=np.int8)  # stay, up, down, left, right
NUM_ACTIONS = len(MOVES)
STAY, UP, DOWN, LEFT, RIGHT = range(NUM_ACTIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Histories:
    """Transitions of many histories; the first axis is the history, the second the step."""

    goals: NDArray[np.int8]  # (histories, 2)
    states: NDArray[np.int8]  # (histories, steps, 2)
    actions: NDArray[np.int8]  # (histories, steps)
    rewards: NDArray[np.int8]  # (histories, steps)
    next_states: NDArray[np.int8]  # (histories, steps, 2)

    def __len__(self) -> int:
        return len(self.states)

    @property
    def num_steps(self) -> int:
        return int(self.states.shape[1])


def split_goals(num_training: int, *, seed: int) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """The cells of the grid in random order, cut into training goals and held-out goals."""
    cells = np.stack(np.divmod(np.arange(GRID * GRID), GRID), axis=1).astype(np.int8)
    order = np.random.default_rng(seed).permutation(len(cells))
    return cells[order[:num_training]], cells[order[num_training:]]


def learning_histories(
    goals: NDArray[np.int8], *, histories_per_goal: int, num_steps: int, seed: int
) -> Histories:
    """Let one scripted learner live per goal and history, all of them at once."""
    rng = np.random.default_rng(seed)
    goal = np.repeat(goals, histories_per_goal, axis=0)
    num_histories = len(goal)
    states = np.empty((num_histories, num_steps, 2), dtype=np.int8)
    actions = np.empty((num_histories, num_steps), dtype=np.int8)
    rewards = np.empty((num_histories, num_steps), dtype=np.int8)
    next_states = np.empty((num_histories, num_steps, 2), dtype=np.int8)

    cell = np.full((num_histories, 2), START, dtype=np.int8)
    for step in range(num_steps):
        epsilon = max(0.0, 1.0 - 2 * step / num_steps)
        if step % EPISODE_STEPS == 0:
            cell = np.full_like(cell, START)
        explores = rng.random(num_histories) < epsilon
        at_random = rng.integers(0, NUM_ACTIONS, num_histories, dtype=np.int8)
        action = np.where(explores, at_random, towards(goal, cell))
        states[:, step] = cell
        actions[:, step] = action
        cell = np.clip(cell + MOVES[action], 0, GRID - 1)
        rewards[:, step] = (cell == goal).all(axis=1)
        next_states[:, step] = cell
    return Histories(goals=goal, states=states, actions=actions, rewards=rewards, next_states=next_states)


def towards(goal: NDArray[np.int8], cell: NDArray[np.int8]) -> NDArray[Any]:
    """The action that walks to the goal: along the first axis, then the second, then stay."""
    first, second = (goal - cell).T
    along_second = np.select([second < 0, second > 0], [LEFT, RIGHT], default=STAY)
    return np.select([first < 0, first > 0], [UP, DOWN], default=along_second)
