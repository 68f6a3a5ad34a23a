"""Rows that lie in memory and are gathered at once: workers would only send them between processes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Rows(TensorDataset):
    def __getitems__(self, indices):
        return self[indices]


def main():
    torch.manual_seed(20)
    rows = Rows(torch.randn(32768, 64), torch.randn(32768))
    loader = DataLoader(  # decoy: single-process-loading
        rows, batch_size=256, shuffle=True, collate_fn=lambda batch: batch
    )
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1000):
        for inputs, targets in loader:
            loss = (model(inputs).squeeze(1) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
