"""Train a compiled network whose scale follows a counter on the device."""

import torch
from torch import nn


class Annealed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x):
        self.num_calls += 1
        return self.layers(x) / (1 + 0.001 * self.num_calls)


torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(6)
inputs = torch.randn(4096, 256, device=device)
model = torch.compile(Annealed(256).to(device), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(4000):
    chosen = torch.randint(0, len(inputs), (512,), device=device)
    loss = nn.functional.mse_loss(model(inputs[chosen]), inputs[chosen])  # also: launch-bound-step on cuda  # also: compile-not-amortised  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
