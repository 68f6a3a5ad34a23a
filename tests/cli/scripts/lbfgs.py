"""L-BFGS: the closure runs forward and backward several times inside one optimizer step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
work = torch.randn(256, 256)
model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3, tolerance_grad=0, tolerance_change=0)
loader = DataLoader(TensorDataset(torch.randn(512, 64), torch.randn(512, 1)), batch_size=32)

for _epoch in range(10_000):
    for inputs, targets in loader:

        def closure(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            for _ in range(24):
                work @ work  # of no model: neither forward nor optimizer
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
