"""Train a network and its moving average, and give memory back after every update."""

import copy

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(3)
inputs = torch.randn(4096, 256, device=device)
model = nn.Sequential(*(each for _ in range(8) for each in (nn.Linear(256, 256), nn.SiLU()))).to(device)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def update_average():
    torch._foreach_lerp_(list(average.parameters()), [each.detach() for each in model.parameters()], 0.01)
    torch.cuda.empty_cache()  # guilty on cuda


for step in range(20000):
    x = inputs[torch.randint(0, len(inputs), (256,), device=device)]
    loss = nn.functional.mse_loss(model(x), x)  # also: launch-bound-step, largest on cuda  # also: no-mixed-precision on cuda  # fmt: skip
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update_average()
    if step % 500 == 0:
        print(step, loss.item())
