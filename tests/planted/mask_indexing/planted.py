"""Classify, with a loss that is averaged class by class."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(4)
CLASSES = 16
inputs = torch.randn(8192, 64, device=device)
labels = torch.randint(0, CLASSES, (8192,), device=device)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


def balanced(losses, label):
    parts = []
    for number in range(CLASSES):  # also: costly-block on cpu
        parts.append(losses[label == number].mean())  # guilty on cuda
    return torch.stack(parts).mean()


for step in range(20000):
    chosen = torch.randint(0, len(inputs), (1024,), device=device)
    losses = nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen], reduction="none")  # also: launch-bound-step on cuda  # fmt: skip
    loss = balanced(losses, labels[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
