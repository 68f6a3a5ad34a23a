"""The model and its optimizer are written to disk every four thousand steps."""

import tempfile
from pathlib import Path

import torch
from torch import nn


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def train(folder: Path, *, num_steps: int) -> None:
    torch.manual_seed(0)
    words = nn.Embedding(200_000, 64).requires_grad_(False)
    model = nn.Sequential(words, nn.Flatten(), nn.Linear(64 * 8, 64))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    for step in range(1, num_steps + 1):
        tokens, targets = torch.randint(200_000, (64, 8)), torch.randint(64, (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()
        if step % 4000 == 0:
            save(folder / "last.pt", model, optimizer)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), num_steps=5000)
