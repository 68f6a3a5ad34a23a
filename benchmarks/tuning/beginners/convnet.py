"""A network of ResNet-18's size on images that are augmented one by one, as a beginner writes it.

    python convnet.py [--size small|full] [--steps N] [--by-hand]

Images are made up.  `--by-hand` adds what most guides name first: torch.compile and 16-bit autocast.
"""

from __future__ import annotations

import argparse
import contextlib

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SIZES = {
    "small": {"images": 256, "pixels": 32, "width": 8, "batch": 16},
    "full": {"images": 4096, "pixels": 128, "width": 64, "batch": 128},
}


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, count: int, pixels: int) -> None:
        rng = np.random.default_rng(0)
        self.labels = rng.integers(0, 10, count)
        self.images = rng.integers(0, 200, (count, pixels, pixels, 3), dtype=np.uint8)
        self.images += (5 * self.labels[:, None, None, None]).astype(np.uint8)  # something to learn
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index].astype(np.float32) / 255
        image = np.pad(image, ((8, 8), (8, 8), (0, 0)), mode="reflect")
        top, left = np.random.randint(0, 16, 2)
        image = image[top : top + self.pixels, left : left + self.pixels]
        if np.random.rand() < 0.5:
            image = image[:, ::-1]
        image = (image - image.mean()) * np.random.uniform(0.8, 1.2) + image.mean()  # contrast
        image = np.clip(image * np.random.uniform(0.8, 1.2), 0, 1)  # brightness
        image = (image - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        return torch.tensor(image.transpose(2, 0, 1).copy(), dtype=torch.float32), int(self.labels[index])


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.short(x))


def make_model(width: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = width
    for stage in range(4):
        outputs = width * 2**stage
        layers += [Block(inputs, outputs, 2 if stage else 1), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--by-hand", action="store_true")
    options = parser.parse_args()
    size = SIZES[options.size]
    torch.manual_seed(0)
    np.random.seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(
        Images(size["images"], size["pixels"]), batch_size=size["batch"], shuffle=True, drop_last=True
    )
    model = make_model(size["width"]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    call = torch.compile(model) if options.by_hand else model
    step, total = 0, 0.0
    while step < options.steps:
        for images, labels in loader:
            half = torch.autocast(device, torch.bfloat16) if options.by_hand else contextlib.nullcontext()
            with half:
                loss = nn.functional.cross_entropy(call(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            total += loss.item()
            if step % 100 == 0:
                print(step, total / step)
            if step >= options.steps:
                break


if __name__ == "__main__":
    main()
