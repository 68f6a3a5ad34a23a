"""Take rows from memory one by one, and sort their errors into a histogram one by one."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_BINS = 10


def note_errors(histogram, errors):
    for error in errors.flatten().tolist():  # guilty: costly-block
        histogram[min(int(abs(error) * NUM_BINS), NUM_BINS - 1)] += 1


def main():
    torch.manual_seed(52)
    rows = TensorDataset(torch.randn(65536, 32), torch.randn(65536, 10))
    model = nn.Linear(32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(rows, batch_size=1024, shuffle=True)  # guilty: rows-one-by-one-from-memory, largest
    histogram = [0] * NUM_BINS
    for epoch in range(1000):
        for inputs, targets in loader:
            errors = model(inputs) - targets
            optimizer.zero_grad()
            errors.square().mean().backward()
            optimizer.step()
            note_errors(histogram, errors.detach())
        print(epoch, histogram)


if __name__ == "__main__":
    main()
