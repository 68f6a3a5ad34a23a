"""Train a small convolutional network on images that are decoded and augmented on the fly."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    """Images kept as spectra; decoding one is an inverse Fourier transform."""

    def __init__(self, num_images, side=96):
        rng = np.random.default_rng(0)
        self.spectra = rng.standard_normal((64, 3, side, side // 2 + 1)).astype(np.complex64)
        self.labels = rng.integers(0, 10, num_images)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = np.fft.irfft2(self.spectra[index % 64])  # also: slow-samples, largest
        if index % 2:
            image = image[:, :, ::-1]
        image = (image - image.mean()) / image.std()  # also: slow-samples, largest
        return torch.from_numpy(image.astype(np.float32)[:, ::3, ::3].copy()), int(self.labels[index])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    loader = DataLoader(Photos(8192), batch_size=args.batch_size, shuffle=True)  # guilty, largest
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
