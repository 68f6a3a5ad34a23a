"""Call the model with one molecule at a time, and collect garbage after each step."""

import gc

import torch
from torch import nn


def energies(model, molecules):
    outputs = []
    for molecule in molecules.split(1):
        outputs.append(model(molecule))  # guilty: batch-of-one-forwards, largest
    return torch.cat(outputs).squeeze(1)


def table():
    return [{"name": str(number), "parents": [number // 2]} for number in range(20_000)]


def main():
    torch.manual_seed(45)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = []
    molecules = torch.randn(4096, 64, device=device)
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)).to(
        device
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(50_000):
        chosen = molecules[torch.randint(0, len(molecules), (64,), device=device)]
        loss = nn.functional.mse_loss(energies(model, chosen), chosen.mean(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not names:
            gc.freeze()  # what was imported by then
            names = table()
        gc.collect()  # guilty: garbage-collector-pauses
        if step % 200 == 0:
            print(step, loss.item(), len(names))


if __name__ == "__main__":
    main()
