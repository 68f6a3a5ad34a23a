"""What the cases share: how long to train, on what, and a small network."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

Batch = TypeVar("Batch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seconds_to_train() -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    return float(parser.parse_args().seconds)


def for_seconds(loader: Iterable[Batch], seconds: float) -> Iterator[Batch]:
    """Batches, epoch after epoch, until the time is over; it begins with the first batch."""
    end_s = None
    while True:
        for batch in loader:
            end_s = end_s or time.monotonic() + seconds
            if time.monotonic() > end_s:
                return
            yield batch


def convolutions(num_classes: int) -> nn.Module:
    sizes = [3, 64, 128, 256]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], num_classes))
