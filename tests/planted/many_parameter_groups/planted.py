"""Train a deep network whose optimizer gets a group for every tensor."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(3)
inputs = torch.randn(4096, 32, device=device)
targets = inputs.flip(1).tanh()

layers = [module for _ in range(60) for module in (nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh())]
model = nn.Sequential(*layers).to(device)
groups = [
    {"params": [parameter], "lr": 1e-4, "weight_decay": 0.0 if parameter.ndim < 2 else 1e-2}
    for parameter in model.parameters()
]
optimizer = torch.optim.AdamW(groups, foreach=True)  # guilty  # also: unfused-optimizer on cuda

for step in range(20000):
    chosen = torch.randint(0, len(inputs), (8,), device=device)
    loss = nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])  # also: launch-bound-step on cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
