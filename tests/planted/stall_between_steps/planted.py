"""A regression whose losses are drawn as a picture of characters, point by point, every ten steps."""

import torch
from torch import nn


def draw(losses):
    picture = []
    for height in range(60, 0, -1):
        row = ""
        for loss in losses:
            row += "#" if loss * 20 > height else " "
        picture.append(row.rstrip())
    return "\n".join(picture)


def main():
    torch.manual_seed(0)
    rows, targets = torch.randn(512, 32), torch.randn(512, 1)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = [1.0] * 2000
    picture = ""
    for step in range(50_000):
        loss = nn.functional.mse_loss(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            losses = [*losses[1:], loss.item()]
            picture = draw(losses)  # guilty
    print(picture)


if __name__ == "__main__":
    main()
