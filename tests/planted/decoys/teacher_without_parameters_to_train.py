"""A teacher whose parameters need no gradients: no graph is recorded, and no_grad would save nothing."""

import torch
from torch import nn


class Teacher(nn.Sequential):
    pass


torch.manual_seed(33)
inputs = torch.randn(512, 256)
teacher = Teacher(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).requires_grad_(False)
student = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)

for step in range(50_000):
    target = teacher(inputs)  # decoy: grad-enabled-inference
    loss = nn.functional.mse_loss(student(inputs), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
