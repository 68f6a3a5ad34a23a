"""Train a network and wait for the GPU in every step, to time it."""

import time

import torch
from torch import nn

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
torch.manual_seed(3)
inputs = torch.randn(4096, 512, device=device)
model = nn.Sequential(*(each for _ in range(12) for each in (nn.Linear(512, 512), nn.SiLU()))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
seconds = 0.0

for step in range(20000):
    start = time.perf_counter()
    x = inputs[torch.randint(0, len(inputs), (1024,), device=device)]
    loss = nn.functional.mse_loss(model(x), x)  # also: launch-bound-step, no-mixed-precision on cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if cuda:
        torch.cuda.synchronize()  # guilty on cuda
    seconds += time.perf_counter() - start
    if step % 500 == 0:
        print(step, loss.item(), seconds)
