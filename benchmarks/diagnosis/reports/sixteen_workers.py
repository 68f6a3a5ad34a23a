"""Train a small GAN on the first resolution of a progressive schedule, with sixteen workers.

Report: rosinality/style-based-gan-pytorch#44 and #48, twice as fast with one worker instead of sixteen.
"""

import argparse
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--mended", action="store_true")
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CODE, RESOLUTION, WIDTH = 64, 8, 32


class MultiResolutionDataset(Dataset):
    """Images as bytes, as a database of key and value returns them."""

    def __init__(self, number=3_200):
        images = np.random.default_rng(0).integers(0, 256, (number, RESOLUTION, RESOLUTION, 3), np.uint8)
        self.records = {f"{RESOLUTION}-{index:05d}": image.tobytes() for index, image in enumerate(images)}

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        pixels = np.frombuffer(self.records[f"{RESOLUTION}-{index:05d}"], np.uint8)
        image = pixels.reshape(RESOLUTION, RESOLUTION, 3)
        if random.random() < 0.5:
            image = image[:, ::-1]
        return torch.from_numpy(image.transpose(2, 0, 1) / np.float32(127.5) - np.float32(1))


def sample_data(dataset, batch_size):
    workers = 1 if args.mended else 16
    return DataLoader(  # guilty: too-many-workers  # also: respawned-workers, loader-bound
        dataset, shuffle=True, batch_size=batch_size, num_workers=workers, drop_last=True
    )


def main():
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(CODE, 4 * 4 * WIDTH), nn.Unflatten(1, (WIDTH, 4, 4)), nn.LeakyReLU(0.2),
        nn.Upsample(scale_factor=2), nn.Conv2d(WIDTH, 3, 3, padding=1), nn.Tanh(),
    ).to(device)  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, padding=1, stride=2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(16 * WIDTH, 1)
    ).to(device)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.0, 0.99))
    loader = sample_data(MultiResolutionDataset(), 64)
    data = iter(loader)
    for step in range(1_000_000):
        try:
            real = next(data)
        except StopIteration:
            data = iter(loader)
            real = next(data)
        real = real.to(device)
        fake = generator(torch.randn(len(real), CODE, device=device))
        d_loss = nn.functional.softplus(discriminator(fake.detach())).mean()
        d_loss = d_loss + nn.functional.softplus(-discriminator(real)).mean()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = nn.functional.softplus(-discriminator(fake)).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        if step % 500 == 0:
            print(f"step {step} G {g_loss.item():.3f} D {d_loss.item():.3f}")


if __name__ == "__main__":
    main()
