"""Balance a pole on a cart: a policy without gradients, every member's episodes in one batch.

The physics are the usual ones (Barto, Sutton and Anderson, 1983), for any number of carts at once.  A member
plays a few episodes from starting points that all members share; its reward is how long the pole stays up.

    python examples/evolution/cart_pole.py --epochs 30
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

from flatout.evolution import Eggroll

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, STEP_S = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
LARGEST_ANGLE, LARGEST_PLACE = math.radians(12), 2.4
STEPS = 200


def advance(state: Tensor, push: Tensor) -> Tensor:
    """One step of every cart; state is [carts, (place, speed, angle, turn)], push -1 or 1."""
    speed, angle, turn = state[:, 1:].unbind(-1)
    sine, cosine = angle.sin(), angle.cos()
    total = CART + POLE
    shared = (FORCE * push + POLE * HALF_LENGTH * turn**2 * sine) / total
    turning = (GRAVITY * sine - cosine * shared) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / total))
    speeding = shared - POLE * HALF_LENGTH * turning * cosine / total
    rates = torch.stack([speed, speeding, turn, turning], dim=-1)
    return state + STEP_S * rates


def steps_upright(policy: nn.Module, start: Tensor) -> Tensor:
    """For how many steps each cart keeps its pole up."""
    state, alive = start, torch.ones(len(start), dtype=torch.bool)
    upright = torch.zeros(len(start))
    for _ in range(STEPS):
        push = policy(state)[:, 0].sign()
        state = torch.where(alive[:, None], advance(state, push), state)
        alive &= (state[:, 2].abs() < LARGEST_ANGLE) & (state[:, 0].abs() < LARGEST_PLACE)
        upright += alive
    return upright


def starts(num: int, *, seed: int) -> Tensor:
    return torch.empty(num, 4).uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(seed))


def train(*, epochs: int, population: int = 64, episodes: int = 4, seed: int = 0) -> tuple[float, float]:
    """Steps upright on unseen starts before and after."""
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    es = Eggroll(policy, population=population, rank=1, sigma=0.1, lr=0.2, others="full", seed=seed)
    unseen = starts(64, seed=10**6)
    with torch.no_grad():
        before = float(steps_upright(policy, unseen).mean())
    for epoch in range(epochs):
        begin = starts(episodes, seed=epoch)
        with es.forward(rows_per_member=episodes) as members:
            rewards = steps_upright(members, begin.repeat(population, 1)).view(population, episodes)
        found = es.tell(rewards)
        print(f"epoch {epoch + 1}: {found.reward_mean:.0f} of {STEPS} steps, the best {found.reward_max:.0f}")
    with torch.no_grad():
        return before, float(steps_upright(policy, unseen).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    before, after = train(epochs=parser.parse_args().epochs)
    print(f"on unseen starts: {before:.0f} steps before, {after:.0f} after")


if __name__ == "__main__":
    main()
