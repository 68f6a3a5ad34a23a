"""Train on batches of images that lie in page-locked memory, waiting for each copy."""

import torch
from torch import nn
from torch.utils.data import DataLoader


def main():
    torch.manual_seed(15)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, side = (384, 128) if device == "cuda" else (128, 32)
    batches = [torch.randn(rows, 3, side, side) for _ in range(8)]
    if device == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    loader = DataLoader(batches, batch_size=None, shuffle=True)
    layers = [layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = nn.Sequential(
        nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * (side // 8) ** 2, 128), nn.ReLU(), *layers
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=device == "cuda")
    for epoch in range(5000):
        for batch in loader:
            batch = batch.to(device)  # guilty on cuda
            loss = model(batch).square().mean()  # also: launch-bound-step, largest on cuda
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 100 == 0:
            print(epoch, loss.item())


if __name__ == "__main__":
    main()
