"""Train a deep, narrow network and look for trouble in its first step alone."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(3)
inputs = torch.randn(4096, 64, device=device)
targets = inputs.flip(1).tanh()

model = nn.Sequential(*(each for _ in range(24) for each in (nn.Linear(64, 64), nn.ELU()))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(20000):
    chosen = torch.randint(0, len(inputs), (32,), device=device)
    loss = nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])  # also: launch-bound-step on cuda
    optimizer.zero_grad()
    with torch.autograd.set_detect_anomaly(step == 0):
        loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
