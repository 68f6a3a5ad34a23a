"""Train a deep, narrow network and note the spread of every parameter, in every step."""

import torch
from torch import nn


def note_spreads(spreads, model):
    for name, parameter in model.named_parameters():  # guilty
        weights = parameter.detach()
        spreads[name] = (weights.norm(), weights.std(), weights.abs().max(), weights.mean())


def main():
    torch.manual_seed(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(50)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(16, 8, device=device)
    spreads = {}
    for step in range(20_000):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note_spreads(spreads, model)
        if step % 500 == 0:
            print(step, loss.item(), spreads["0.weight"][1].item())


if __name__ == "__main__":
    main()
