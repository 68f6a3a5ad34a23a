"""Train a policy whose distribution trusts its arguments."""

import torch
from torch import nn
from torch.distributions import Categorical

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(4)
states = torch.randn(8192, 32, device=device)
model = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(32, 32), nn.Tanh()))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(20000):
    logits = model(states[torch.randint(0, len(states), (256,), device=device)])  # also: launch-bound-step on cuda  # fmt: skip
    policy = Categorical(logits=logits, validate_args=False)
    action = policy.sample()
    loss = -(policy.log_prob(action) * torch.randn(256, device=device)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
