"""A target network that is brought up to date every hundredth step: a copy that costs nothing."""

import copy

import torch
from torch import nn

torch.manual_seed(37)
states = torch.randn(1024, 128)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
target = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(50_000):
    with torch.no_grad():
        wanted = states + 0.9 * target(states)
    loss = nn.functional.mse_loss(model(states), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        target.load_state_dict(model.state_dict())  # decoy: weights-copied-in-loop
        print(step, loss.item())
