"""Train a network on what a large encoder sees, and wait for the GPU in every step, to time the encoder."""

import time

import torch
from torch import nn

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
torch.manual_seed(3)
rows, width, dtype = (8192, 4096, torch.bfloat16) if cuda else (256, 32, torch.float32)
inputs = torch.randn(rows, width, device=device, dtype=dtype)
encoder = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device, dtype).eval()
head = [nn.Linear(width, 64), *(each for _ in range(16) for each in (nn.Linear(64, 64), nn.SiLU()))]
model = nn.Sequential(*head).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=cuda)
seconds = 0.0

for step in range(20000):
    start = time.perf_counter()
    with torch.no_grad():
        features = encoder(inputs)[: rows // 32].float()
    if cuda:
        torch.cuda.synchronize()  # guilty on cuda
    seconds += time.perf_counter() - start
    loss = model(features).square().mean()  # also: launch-bound-step, largest on cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item(), seconds)
