"""Train a deep, narrow network: hundreds of small kernels, each launched by Python."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(5)

inputs = torch.randn(20000, 32, device=device)
targets = inputs.roll(1, dims=1).tanh()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


model = nn.Sequential(*(Block(32) for _ in range(24))).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)  # also: unfused-optimizer on cuda

for step in range(6000):
    chosen = torch.randint(0, len(inputs), (128,), device=device)
    loss = (model(inputs[chosen]) - targets[chosen]).pow(2).mean()  # guilty on cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
