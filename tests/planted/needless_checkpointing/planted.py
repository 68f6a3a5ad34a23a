"""Train a small network that keeps none of its activations, on a machine with memory to spare."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(4)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # guilty
        return x


width = 48 if device.type == "cpu" else 1024
inputs = torch.randn(4096, width, device=device)
model = Model(width, 6).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(20000):
    chosen = torch.randint(0, len(inputs), (256,), device=device)
    loss = nn.functional.mse_loss(model(inputs[chosen]), inputs[chosen])  # also: launch-bound-step, no-mixed-precision on cuda  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
