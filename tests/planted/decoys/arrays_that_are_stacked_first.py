"""Arrays that NumPy joins before torch sees them, in every step."""

import numpy as np
import torch
from torch import nn


def main():
    torch.manual_seed(28)
    model = nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    numbers = np.random.default_rng(28)
    observations = [numbers.standard_normal(64, dtype=np.float32) for _ in range(256)]
    for step in range(50_000):
        inputs = torch.tensor(np.stack(observations))  # decoy: list-of-arrays-to-tensor
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
