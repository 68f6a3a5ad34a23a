"""Regress molecule energies, one molecule at a time."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Settings:
    batch_size: int = 48
    features: int = 128
    epochs: int = 100
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def energies(model, molecules):
    outputs = []
    for molecule in molecules.split(1):
        outputs.append(model(molecule))  # guilty
    return torch.cat(outputs).squeeze(-1)


def train(settings):
    torch.manual_seed(8)
    molecules = torch.randn(4800, settings.features)
    dataset = TensorDataset(molecules, molecules.square().mean(1))
    loader = DataLoader(dataset, batch_size=settings.batch_size, shuffle=True)
    model = nn.Sequential(
        nn.Linear(settings.features, 256),
        nn.LayerNorm(256),
        nn.SiLU(),
        nn.Linear(256, 256),
        nn.SiLU(),
        nn.Linear(256, 1),
    ).to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(settings.epochs):
        for molecules, targets in loader:
            predicted = energies(model, molecules.to(settings.device))
            loss = nn.functional.huber_loss(predicted, targets.to(settings.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    train(Settings())
