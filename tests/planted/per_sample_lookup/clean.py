"""Denoise samples at random times, whose noise levels are looked up in a schedule."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(6)
times = torch.arange(999, -1, -10, device=device)
levels = torch.linspace(0.01, 1.0, len(times), device=device)
data = torch.randn(4096, 64, device=device)
model = nn.Sequential(nn.Linear(65, 128), nn.SiLU(), nn.Linear(128, 64)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def level_of(chosen):
    found = (999 - chosen) // 10
    return levels[found]


for step in range(20000):
    clean = data[torch.randint(0, len(data), (64,), device=device)]
    chosen = times[torch.randint(0, len(times), (64,), device=device)]
    level = level_of(chosen).unsqueeze(1)
    noise = torch.randn_like(clean)
    loss = nn.functional.mse_loss(model(torch.cat([clean + level * noise, level], 1)), noise)  # also: launch-bound-step on cuda  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
