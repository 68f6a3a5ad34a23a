"""Train an ensemble, one member after the other."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(2)


def member():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(
        device
    )


data = torch.randn(4096, 16, device=device)
targets = data.square().mean(1, keepdim=True)
members = [member() for _ in range(16)]
optimizer = torch.optim.SGD([parameter for each in members for parameter in each.parameters()], lr=1e-3)

for step in range(20000):
    chosen = torch.randint(0, len(data), (64,), device=device)
    x, y = data[chosen], targets[chosen]
    loss = torch.zeros((), device=device)
    for each in members:
        loss = loss + nn.functional.mse_loss(each(x), y)  # guilty  # also: launch-bound-step on cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
