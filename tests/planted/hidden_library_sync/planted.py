"""Train a policy on what a large encoder sees, with a distribution that checks its arguments."""

import torch
from torch import nn
from torch.distributions import Categorical

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
torch.manual_seed(4)
rows, width, dtype = (32768, 4096, torch.bfloat16) if cuda else (256, 32, torch.float32)
states = torch.randn(rows, width, device=device, dtype=dtype)
encoder = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device, dtype).eval()
head = [nn.Linear(width, 32), *(each for _ in range(16) for each in (nn.Linear(32, 32), nn.Tanh()))]
model = nn.Sequential(*head).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=cuda)

for step in range(20000):
    with torch.no_grad():
        features = encoder(states)[:256].float()
    logits = model(features)  # also: launch-bound-step on cuda
    policy = Categorical(logits=logits)  # guilty on cuda
    action = policy.sample()
    loss = -(policy.log_prob(action) * torch.randn(len(action), device=device)).mean()  # guilty on cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
