"""Inference: two modules called for each batch, nothing is trained."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

encoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
head = nn.Linear(64, 4)
loader = DataLoader(TensorDataset(torch.randn(640, 64)), batch_size=16)

with torch.inference_mode():
    for _pass in range(10_000):
        for (inputs,) in loader:
            scores = head(encoder(inputs))
            best = [float(row.max()) for row in scores]  # one sync per row
