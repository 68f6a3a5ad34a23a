"""Train a deep, wide network with an optimizer that updates lists of tensors."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(3)
inputs = torch.randn(512, 1024, device=device)
targets = inputs.flip(1).tanh()

layers = [
    module for _ in range(8 if device.type == "cpu" else 24) for module in (nn.Linear(1024, 1024), nn.Tanh())
]
model = nn.Sequential(*layers).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)  # guilty on cuda

for step in range(20000):
    chosen = torch.randint(0, len(inputs), (8,), device=device)
    loss = nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])  # also: launch-bound-step, largest on cuda  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
