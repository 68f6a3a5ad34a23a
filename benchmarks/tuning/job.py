"""A small job with everything that a wrong treatment may touch.

    python job.py [--anomalies] [--crash] [--steps N]

Two batches make a step; there is dropout, momentum, a loss that is read.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MICRO_BATCHES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anomalies", action="store_true", help="let autograd look for NaN in every step")
    parser.add_argument("--crash", action="store_true", help="raise after a few steps")
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(options.anomalies)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(8192, 64)
    y = (x @ torch.randn(64, 8)).argmax(1)
    layers: list[nn.Module] = [nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1)]
    for _ in range(4):
        layers += [nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(128, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    num_batches, total = 0, 0.0
    while num_batches < options.steps * MICRO_BATCHES:
        for a, b in DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True):
            num_batches += 1
            loss = nn.functional.cross_entropy(model(a.to(device)), b.to(device))
            (loss / MICRO_BATCHES).backward()
            total += loss.item()
            if num_batches % MICRO_BATCHES:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if options.crash and num_batches > 10:
                raise ValueError("planted")
            if num_batches >= options.steps * MICRO_BATCHES:
                break
    print(total / num_batches)


if __name__ == "__main__":
    main()
