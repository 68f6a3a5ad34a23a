"""A learning rate for every layer, as fine-tuning recipes have it: groups that no merging joins."""

import torch
from torch import nn

torch.manual_seed(32)
inputs = torch.randn(1024, 256)
layers = [nn.Linear(256, 256) for _ in range(12)]
model = nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))
groups = [{"params": layer.parameters(), "lr": 1e-3 * 0.8**depth} for depth, layer in enumerate(layers)]
optimizer = torch.optim.AdamW(groups)  # decoy: many-parameter-groups

for step in range(50_000):
    loss = nn.functional.mse_loss(model(inputs), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
