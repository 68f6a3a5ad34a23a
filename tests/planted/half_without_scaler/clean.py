"""Train in float16 with a loss that is scaled."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1)
inputs = torch.randn(4096, 64, device=device)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device.type)

for step in range(20000):
    x = inputs[torch.randint(0, len(inputs), (64,), device=device)]
    with torch.autocast(device.type, dtype=torch.float16):
        out = model(x)  # also: launch-bound-step on cuda
    loss = nn.functional.mse_loss(out.float(), x)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 500 == 0:
        print(step, loss.item())
