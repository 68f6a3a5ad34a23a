"""Train on measurements that are 32-bit floats from the start."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader


def main():
    torch.manual_seed(16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, times = (4096, 4) if device == "cuda" else (256, 1)
    numbers = np.random.default_rng(16)
    batches = [torch.from_numpy(numbers.standard_normal((1024, width), dtype=np.float32)) for _ in range(8)]
    if device == "cuda":
        batches = [batch.repeat(times, 1).pin_memory() for batch in batches]
    loader = DataLoader(batches, batch_size=None, shuffle=True)
    model = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(5000):
        for batch in loader:
            inputs = batch.to(device, non_blocking=True)
            loss = model(inputs).square().mean()  # also: launch-bound-step on cuda
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 100 == 0:
            print(epoch, loss.item())


if __name__ == "__main__":
    main()
