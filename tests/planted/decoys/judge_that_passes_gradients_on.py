"""A frozen judge in the loss of a generator: no optimizer has its parameters, and yet its gradients are wanted."""

import torch
from torch import nn


class Judge(nn.Sequential):
    pass


torch.manual_seed(34)
noise = torch.randn(512, 128)
judge = Judge(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
generator = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(generator.parameters(), lr=1e-3)

for step in range(50_000):
    loss = -judge(generator(noise)).mean()  # decoy: grad-enabled-inference
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
