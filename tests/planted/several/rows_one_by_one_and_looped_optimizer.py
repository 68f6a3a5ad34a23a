"""Take rows from memory one by one, and update a deep, narrow network one tensor after the other."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(52)
    rows = TensorDataset(torch.randn(65536, 32), torch.randn(65536, 32))
    model = nn.Sequential(*(each for _ in range(20) for each in (nn.Linear(32, 32), nn.Tanh())))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)  # guilty: looped-optimizer
    loader = DataLoader(rows, batch_size=1024, shuffle=True)  # guilty: rows-one-by-one-from-memory, largest
    for epoch in range(1000):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
