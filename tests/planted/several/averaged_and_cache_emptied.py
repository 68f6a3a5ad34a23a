"""Keep an average of the weights one by one, and give the GPU's cached memory back in every step."""

import copy

import torch
from torch import nn


@torch.no_grad()
def follow(average, model):
    for kept, new in zip(average.parameters(), model.parameters()):  # guilty: per-parameter-python-loop
        kept.mul_(0.99).add_(new, alpha=0.01)


def main():
    torch.manual_seed(53)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(40)]).to(device)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(4096 if device == "cuda" else 32, 256, device=device)
    for step in range(100_000):
        loss = model(inputs).square().mean()  # also: launch-bound-step, no-mixed-precision on cuda
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(average, model)
        if device == "cuda":
            torch.cuda.empty_cache()  # guilty: empty-cache-in-loop, largest on cuda
        if step % 200 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
