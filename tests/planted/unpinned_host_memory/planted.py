"""Compress large spectrograms with an autoencoder."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN = 2048 if DEVICE == "cuda" else 64


class Rows(TensorDataset):
    """A dataset that is asked for whole batches."""

    def __getitems__(self, indices):
        return self.tensors[0][indices]  # also: slow-samples


def autoencoder(width):
    return nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width))


def run(num_epochs=400, width=2048):
    spectrograms = torch.randn(4096, width)
    loader = DataLoader(  # also: loader-bound  # also: too-many-workers on cpu
        Rows(spectrograms),
        batch_size=1024 if DEVICE == "cuda" else 128,
        shuffle=True,
        collate_fn=lambda batch: batch,
        num_workers=2,
        persistent_workers=True,
    )
    model = autoencoder(width).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(num_epochs):
        for batch in loader:
            batch = batch.to(DEVICE, non_blocking=True)  # guilty on cuda
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda"):
                loss = nn.functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "loss", loss.item())


if __name__ == "__main__":
    run()
