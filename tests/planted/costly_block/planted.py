"""A classifier whose confusion table is counted prediction by prediction, in every step."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

NUM_CLASSES = 10


def count(table, logits, targets):
    for predicted, wanted in zip(logits.argmax(1).tolist(), targets.tolist()):
        table[wanted][predicted] += 1  # guilty


def main():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(65536, 32), torch.randint(NUM_CLASSES, (65536,)))
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    table = [[0] * NUM_CLASSES for _ in range(NUM_CLASSES)]
    rows, classes = data.tensors
    for _epoch in range(10_000):
        for start in range(0, len(data), 8192):
            inputs, targets = rows[start : start + 8192], classes[start : start + 8192]
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count(table, logits, targets)


if __name__ == "__main__":
    main()
