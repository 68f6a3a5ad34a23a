"""Fit a network whose numbers must stay in 32 bits, with products of the GPU's own units."""

import torch
from torch import nn

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
torch.manual_seed(9)
torch.set_float32_matmul_precision("high")
width, batch = (4096, 2048) if cuda else (128, 128)
inputs = torch.randn(4 * batch, width, device=device)
model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(20000):
    x = inputs[torch.randint(0, len(inputs), (batch,), device=device)]
    with torch.autocast(device.type, enabled=False):
        loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
