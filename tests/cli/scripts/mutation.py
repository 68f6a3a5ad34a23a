"""Batches are changed by the step that gets them: a key is popped, a tensor is scaled in place."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        values = torch.ones(64) * (index % 7 + 1)
        return {"inputs": values, "targets": values[:1] * 2}


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _epoch in range(10_000):
    for batch in DataLoader(Samples(), batch_size=16):
        inputs, targets = batch.pop("inputs"), batch.pop("targets")
        if inputs.max() > 7 or inputs.requires_grad:
            sys.exit("a batch came back changed")
        if "in-place" in sys.argv:
            inputs.mul_(10.0)
        inputs.requires_grad_()
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
