"""Look the noise level of each sample up by itself, and write noise to a log in every step."""

import logging

import torch
from torch import nn

log = logging.getLogger("training")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(48)
times = torch.arange(999, -1, -10, device=device)
levels = torch.linspace(0.01, 1.0, len(times), device=device)
data = torch.randn(4096, 64, device=device)
model = nn.Sequential(nn.Linear(65, 128), nn.SiLU(), nn.Linear(128, 64)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
logging.basicConfig(filename="training.log", level=logging.INFO, format="%(asctime)s %(message)s")


def level_of(chosen):
    found = [(times == value).nonzero().item() for value in chosen]  # guilty: per-sample-lookup, largest
    return levels[found]


for step in range(50_000):
    clean = data[torch.randint(0, len(data), (192,), device=device)]
    chosen = times[torch.randint(0, len(times), (192,), device=device)]
    level = level_of(chosen).unsqueeze(1)
    noise = torch.randn_like(clean)
    loss = nn.functional.mse_loss(model(torch.cat([clean + level * noise, level], 1)), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.info("step %d noise %s", step, noise[:64, :8].tolist())  # guilty: logging-every-step
