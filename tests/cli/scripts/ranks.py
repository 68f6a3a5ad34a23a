"""Two gloo processes with DistributedDataParallel: one is slower and much is exchanged, or full batches."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
width = 16384 if "slow" in sys.argv else 128  # 8 MB of gradients for 16 rows
network = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 1))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
samples = TensorDataset(torch.randn(1280, 64), torch.randn(1280, 1))
loader = DataLoader(samples, batch_size=16, sampler=DistributedSampler(samples))
work = torch.randn(256, 256)
num_steps = 0
try:
    for _epoch in range(10_000):
        for inputs, targets in loader:
            if sys.argv[1:] == ["half", "both"]:
                inputs = inputs.view(16, 64)
            if sys.argv[1:] == ["slow", str(rank)]:
                for _ in range(40):
                    work @ work
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            num_steps += 1
            optimizer.step()
finally:
    # one write: two processes share the stream
    os.write(sys.stdout.fileno(), f"rank {rank} ended at step {num_steps}\n".encode())
