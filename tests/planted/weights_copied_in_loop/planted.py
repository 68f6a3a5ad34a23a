"""Score a batch with the weights of several earlier models, each loaded into one network."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(8)


def network():
    return nn.Sequential(*(each for _ in range(12) for each in (nn.Linear(64, 64), nn.Tanh()))).to(device)


data = torch.randn(4096, 64, device=device)
earlier = [network().state_dict() for _ in range(6)]
judge, model = network(), network()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def goal(x):
    total = torch.zeros_like(x)
    with torch.no_grad():
        for weights in earlier:
            judge.load_state_dict(weights)  # guilty
            total += judge(x)
    return total / len(earlier)


for step in range(20000):
    x = data[torch.randint(0, len(data), (32,), device=device)]
    target = goal(x)
    loss = nn.functional.mse_loss(model(x), target)  # also: launch-bound-step on cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
