"""A starved loader: one worker unpacks images, and the network is done long before the next batch."""

from __future__ import annotations

import random
import zlib

import torch
from common import DEVICE, convolutions, for_seconds, seconds_to_train
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE, NUM_CLASSES = 224, 100


class Packed(Dataset[tuple[torch.Tensor, int]]):
    """Images as a disk holds them: compressed, and unpacked again in every epoch."""

    def __init__(self) -> None:
        pixels = random.Random(0).randbytes(3 * SIDE * SIDE // 4) * 4
        self.packed = zlib.compress(pixels)

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = torch.frombuffer(bytearray(zlib.decompress(self.packed)), dtype=torch.uint8)
        image = pixels.view(3, SIDE, SIDE).float() / 255
        return (image - image.mean()) / image.std(), index % NUM_CLASSES


def main() -> None:
    model = convolutions(NUM_CLASSES).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Packed(), batch_size=128 if DEVICE == "cuda" else 4, num_workers=1)
    for images, labels in for_seconds(loader, seconds_to_train()):
        loss = nn.functional.cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
