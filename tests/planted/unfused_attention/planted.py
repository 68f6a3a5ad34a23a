"""Train a small transformer that writes its attention out."""

import math

import torch
from torch import nn
from torch.nn import functional as F

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(11)
WIDTH, HEADS, LENGTH = 32, 2, 256 if device.type == "cpu" else 2048


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("future", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(self.future, float("-inf"))
        mixed = F.softmax(scores, dim=-1) @ v  # guilty
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


inputs = torch.randn(32, LENGTH, WIDTH, device=device)
model = nn.Sequential(*(Attention() for _ in range(2))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(20000):
    x = inputs[torch.randint(0, len(inputs), (2,), device=device)]
    loss = F.mse_loss(model(x), x.roll(1, 1))  # also: no-mixed-precision, launch-bound-step on cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
