"""Train an ensemble one member after the other, and draw the losses as characters every fifty steps."""

import torch
from torch import nn

torch.manual_seed(49)


def member():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def draw(losses):
    picture = []
    for height in range(60, 0, -1):
        row = ""
        for loss in losses:
            row += "#" if loss * 20 > height else " "
        picture.append(row.rstrip())
    return "\n".join(picture)


data = torch.randn(4096, 16)
targets = data.square().mean(1, keepdim=True)
members = [member() for _ in range(16)]
optimizer = torch.optim.SGD([parameter for each in members for parameter in each.parameters()], lr=1e-3)
losses, picture = [1.0] * 10_000, ""

for step in range(50_000):
    chosen = torch.randint(0, len(data), (64,))
    x, y = data[chosen], targets[chosen]
    loss = torch.zeros(())
    for each in members:
        loss = loss + nn.functional.mse_loss(each(x), y)  # guilty: sequential-variants, largest
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        losses = [*losses[1:], loss.item()]
        picture = draw(losses)  # guilty: stall-between-steps
