"""Train a deep, narrow network and log the norm of every gradient."""

from collections import defaultdict

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(4)

inputs = torch.randn(20000, 64, device=device)
targets = inputs.roll(1, dims=1).sin()

layers = []
for _ in range(16):
    layers += [nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU()]
model = nn.Sequential(*layers, nn.Linear(64, 64)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
history = defaultdict(list)

for step in range(6000):
    chosen = torch.randint(0, len(inputs), (512,), device=device)
    loss = (model(inputs[chosen]) - targets[chosen]).pow(2).mean()  # also: launch-bound-step, largest on cuda
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():  # also: per-parameter-python-loop
        history[name].append(parameter.grad.norm().item())  # guilty on cuda
    optimizer.step()
    if step % 200 == 0:
        print(step, {name: round(norms[-1], 4) for name, norms in list(history.items())[:3]})
