"""Regress molecule energies, a batch of molecules at a time."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Settings:
    batch_size: int = 768
    features: int = 128
    steps: int = 5000
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class Reference(nn.Module):
    """The energy of one molecule by a formula; there is nothing in it to train or to reuse."""

    def forward(self, molecule):
        return molecule.square().mean(1)


def train(settings):
    torch.manual_seed(8)
    molecules = torch.randn(20000, settings.features, device=settings.device)
    reference = Reference()
    model = nn.Sequential(
        nn.Linear(settings.features, 256),
        nn.LayerNorm(256),
        nn.SiLU(),
        nn.Linear(256, 256),
        nn.SiLU(),
        nn.Linear(256, 1),
    ).to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(settings.steps):
        batch = molecules[torch.randint(0, len(molecules), (settings.batch_size,), device=settings.device)]
        loss = nn.functional.huber_loss(model(batch).squeeze(-1), reference(batch))  # also: launch-bound-step on cuda  # fmt: skip
        # Many calls on single rows, of a module without weights.
        spot_checks = torch.cat([reference(molecule) for molecule in batch[:16].split(1)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            with torch.no_grad():
                probe = model(batch[:1])
            print(f"step {step}: {loss.item():.4f} {probe.item():.3f} {spot_checks.mean().item():.3f}")


if __name__ == "__main__":
    train(Settings())
