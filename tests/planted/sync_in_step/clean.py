"""Train a deep, narrow network and log the norm of every gradient, now and then."""

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
temperature = torch.tensor(1.0)  # lives on the host, so reading it waits for nothing
history = []

for step in range(6000):
    chosen = torch.randint(0, len(inputs), (512,), device=device)
    loss = (model(inputs[chosen]) - targets[chosen]).pow(2).mean() * temperature.item()  # also: launch-bound-step on cuda  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    norms = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
    history.append(norms)
    optimizer.step()
    temperature *= 0.9999
    if step % 200 == 0:
        print(step, [round(norm, 4) for norm in norms[:3].tolist()])
