"""Fit a small network to rows that lie in memory, taken a batch at once."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Rows(TensorDataset):
    def __getitems__(self, indices):
        return self[indices]


def main():
    torch.manual_seed(7)
    x, y = torch.randn(65536, 32), torch.randn(65536)
    model = nn.Sequential(nn.Linear(32, 448), nn.ReLU(), nn.Linear(448, 192), nn.ReLU(), nn.Linear(192, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(x, y), batch_size=256, shuffle=True, collate_fn=lambda batch: batch)
    for epoch in range(1000):
        for rows, targets in loader:
            loss = (model(rows).squeeze(1) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
