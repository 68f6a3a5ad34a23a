"""A classifier whose fitness is accuracy itself, which has no gradient.

Two spirals wind around each other; a small network tells them apart.  Every member sees the same batch, and a
reward is 1 where its answer is right.

    python examples/evolution/spirals.py --epochs 300
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

from flatout.evolution import Eggroll


def spirals(num: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Points [num, 2] on two spirals and the spiral each lies on."""
    stream = torch.Generator().manual_seed(seed)
    along = torch.rand(num, generator=stream).sqrt() * 1.5 * math.pi + 0.5
    label = torch.randint(0, 2, (num,), generator=stream)
    angle = along + math.pi * label
    points = torch.stack([angle.cos(), angle.sin()], dim=-1) * (along / 5)[:, None]
    return points + 0.02 * torch.randn(num, 2, generator=stream), label


def accuracy(model: nn.Module, points: Tensor, label: Tensor) -> float:
    with torch.no_grad():
        return float((model(points).argmax(-1) == label).float().mean())


def train(*, epochs: int, population: int = 128, batch: int = 64, seed: int = 0) -> tuple[float, float]:
    """Accuracy on unseen points before and after."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    es = Eggroll(model, population=population, rank=1, sigma=0.1, lr=1.0, others="full", seed=seed)
    unseen = spirals(1000, seed=10**6)
    before = accuracy(model, *unseen)
    for epoch in range(epochs):
        points, label = spirals(batch, seed=epoch)
        with es.forward(rows_per_member=batch) as members:
            chosen = members(points.repeat(population, 1)).view(population, batch, 2).argmax(-1)
        found = es.tell((chosen == label).float(), cosine=False)
        if epoch % 25 == 24:
            print(f"epoch {epoch + 1}: the population is right in {found.reward_mean:.0%}")
    return before, accuracy(model, *unseen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=300)
    before, after = train(epochs=parser.parse_args().epochs)
    print(f"on unseen points: {before:.0%} right before, {after:.0%} after")


if __name__ == "__main__":
    main()
