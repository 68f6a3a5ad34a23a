"""Anomaly detection for the first step alone, which the steps that follow do not pay for."""

import torch
from torch import nn

torch.manual_seed(36)
inputs = torch.randn(512, 256)
model = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(256, 256), nn.Tanh())))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(50_000):
    with torch.autograd.set_detect_anomaly(step == 0):  # decoy: anomaly-detection-left-on
        loss = nn.functional.mse_loss(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
