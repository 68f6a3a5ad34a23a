"""Equal layers that are called one after the other, because each needs what the one before has computed."""

import torch
from torch import nn

torch.manual_seed(35)
inputs = torch.randn(1024, 256)
layers = [nn.Linear(256, 256) for _ in range(8)]
optimizer = torch.optim.SGD([weight for layer in layers for weight in layer.parameters()], lr=1e-3)

for step in range(50_000):
    hidden = inputs
    for layer in layers:
        hidden = torch.tanh(layer(hidden))  # decoy: sequential-variants
    loss = nn.functional.mse_loss(hidden, inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
