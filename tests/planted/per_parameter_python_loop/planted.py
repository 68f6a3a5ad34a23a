"""Train a deep, narrow network and keep an average of its weights, one parameter after the other."""

import copy

import torch
from torch import nn

DECAY = 0.99


@torch.no_grad()
def follow(average, model):
    for kept, parameter in zip(average.parameters(), model.parameters()):  # guilty
        kept.copy_(DECAY * kept + (1 - DECAY) * parameter)


def main():
    torch.manual_seed(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(50)]).to(device)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(16, 8, device=device)
    for step in range(20_000):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(average, model)
        if step % 500 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
