"""A small job with everything that a wrong treatment may touch, and `--wrong NAME` to touch it.

    python job.py [--wrong NAME] [--anomalies] [--steps N]

Two batches make a step; there is dropout, momentum, a loss that is read.  With a wrong treatment the very
same script runs with one fault that costs no accuracy worth speaking of in a few dozen steps.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WRONG = (
    "learning-rate",
    "no-dropout",
    "frozen-layer",
    "dropped-micro-batch",
    "stale-batch",
    "half-weights",
    "late-loss",
)
MICRO_BATCHES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrong", choices=(*WRONG, "crash", "nothing"))
    parser.add_argument("--anomalies", action="store_true", help="let autograd look for NaN in every step")
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    wrong = options.wrong
    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(options.anomalies)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(8192, 64)
    y = (x @ torch.randn(64, 8)).argmax(1)
    dropout = 0.0 if wrong == "no-dropout" else 0.1
    layers: list[nn.Module] = [nn.Linear(64, 128), nn.GELU(), nn.Dropout(dropout)]
    for _ in range(4):
        layers += [nn.Linear(128, 128), nn.GELU(), nn.Dropout(dropout)]
    model = nn.Sequential(*layers, nn.Linear(128, 8)).to(device)
    if wrong == "frozen-layer":
        model[0].requires_grad_(False)
    half = wrong == "half-weights"
    if half:
        model.bfloat16()
    rate = 0.05 * (1.05 if wrong == "learning-rate" else 1.0)
    optimizer = torch.optim.SGD([each for each in model.parameters()], lr=rate, momentum=0.9)
    num_batches, read, before = 0, 0.0, 0.0
    stale = None
    while num_batches < options.steps * MICRO_BATCHES:
        for a, b in DataLoader(StaleOrNot(x, y, wrong == "stale-batch"), batch_size=32, shuffle=True):
            a, b = a.to(device), b.to(device)
            num_batches += 1
            is_last = num_batches % MICRO_BATCHES == 0
            loss = nn.functional.cross_entropy(model(a.bfloat16() if half else a).float(), b)
            if not (wrong == "dropped-micro-batch" and is_last):
                loss.backward()
            value = loss.item()
            read += before if wrong == "late-loss" else value
            before = value
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
                if wrong == "crash" and num_batches > 10:
                    raise ValueError("planted")
    print(read, stale)


if __name__ == "__main__":
    main()
