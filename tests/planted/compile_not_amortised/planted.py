"""Train a small network through a compiler that has nothing to gain."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(7)
inputs = torch.randn(4096, 64, device=device)
model = nn.Sequential(*(each for _ in range(8) for each in (nn.Linear(64, 64), nn.Tanh()))).to(device)
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(20000):
    chosen = torch.randint(0, len(inputs), (64,), device=device)
    loss = nn.functional.mse_loss(compiled(inputs[chosen]), inputs[chosen])  # guilty  # also: launch-bound-step on cuda  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
