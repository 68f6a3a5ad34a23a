"""One attention among forty small layers: launches fill a GPU's step, not scores and not 32-bit products."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(38)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return x + scores.softmax(dim=-1) @ v  # decoy: unfused-attention


inputs = torch.randn(4096, 16, 32, device=device)
blocks = [Block(32) for _ in range(40)]
model = nn.Sequential(*blocks[:20], Attention(32), *blocks[20:]).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(50_000):
    x = inputs[torch.randint(0, len(inputs), (8,), device=device)]
    loss = (model(x) - x).square().mean()  # guilty: launch-bound-step on cuda  # decoy: no-mixed-precision
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(step, loss.item())
