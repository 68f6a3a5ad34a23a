"""A learning rate that falls and starts again within an epoch, as its name says."""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LinearLR
from torch.utils.data import DataLoader, TensorDataset


class Rows(TensorDataset):
    def __getitems__(self, indices):
        return self[indices]


def main():
    torch.manual_seed(27)
    rows = Rows(torch.randn(65536, 64), torch.randn(65536))
    loader = DataLoader(rows, batch_size=256, shuffle=True, collate_fn=lambda batch: batch)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    restarts = CosineAnnealingWarmRestarts(optimizer, T_0=20)  # decoy: scheduler-steps-mismatch
    warm_up = LinearLR(optimizer, total_iters=10)
    for epoch in range(1000):
        for inputs, targets in loader:
            loss = (model(inputs).squeeze(1) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            restarts.step()
            warm_up.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
