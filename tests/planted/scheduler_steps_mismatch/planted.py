"""Fit a network under a learning rate that falls by a cosine, counted in epochs and stepped in batches."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_EPOCHS = 20


class Rows(TensorDataset):
    def __getitems__(self, indices):
        return self[indices]


def main():
    torch.manual_seed(13)
    rows = Rows(torch.randn(65536, 128), torch.randn(65536))
    loader = DataLoader(rows, batch_size=256, shuffle=True, collate_fn=lambda batch: batch)
    model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_EPOCHS)  # guilty
    for epoch in range(10 * NUM_EPOCHS):
        for inputs, targets in loader:
            loss = (model(inputs).squeeze(1) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
