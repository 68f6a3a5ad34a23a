"""Train on images from page-locked memory, without waiting for the copy."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Images(TensorDataset):
    def __getitems__(self, indices):
        return self[indices]


def main():
    torch.manual_seed(15)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side, number = (128, 2048) if device == "cuda" else (16, 2048)
    images = Images(torch.randn(number, 3, side, side))
    loader = DataLoader(
        images, batch_size=256, shuffle=True, pin_memory=device == "cuda", collate_fn=lambda batch: batch
    )
    model = nn.Sequential(
        nn.Conv2d(3, 32, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1000):
        for (batch,) in loader:
            batch = batch.to(device, non_blocking=True)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
