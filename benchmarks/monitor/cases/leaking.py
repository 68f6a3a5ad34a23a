"""An out-of-memory about to happen: outputs are kept for a metric that is computed after the last epoch.

What the card holds besides is made large enough for the end to come after about `--seconds`.  It comes: the
script dies of torch.OutOfMemoryError.  Without a GPU the same leak is small and ends with the time.
"""

from __future__ import annotations

import time

import torch
from common import DEVICE, for_seconds, seconds_to_train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, ROWS, NUM_CLASSES = (2048, 8192, 1024) if DEVICE == "cuda" else (256, 256, 256)
WARM_UP_STEPS = 12


def main() -> None:
    seconds = seconds_to_train()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    rows = torch.randn(8 * ROWS, WIDTH, pin_memory=DEVICE == "cuda")
    loader = DataLoader(TensorDataset(rows), batch_size=ROWS, pin_memory=DEVICE == "cuda")
    kept: list[torch.Tensor] = []
    start_s = time.monotonic()
    for number, (batch,) in enumerate(for_seconds(loader, 4 * seconds if DEVICE == "cuda" else seconds)):
        outputs = model(batch.to(DEVICE, non_blocking=True))
        optimizer.zero_grad()
        outputs.square().mean().backward()
        optimizer.step()
        kept.append(outputs.detach())
        if number == WARM_UP_STEPS // 3:
            start_s = time.monotonic()
        if number == WARM_UP_STEPS and DEVICE == "cuda":
            step_s = (time.monotonic() - start_s) / (WARM_UP_STEPS - WARM_UP_STEPS // 3)
            kept.append(fill(leaves_bytes=int(seconds / step_s * outputs.nbytes)))


def fill(*, leaves_bytes: int) -> torch.Tensor:
    """All of the card but what the leak takes until the end."""
    free_bytes, _ = torch.cuda.mem_get_info()
    return torch.empty(max(free_bytes - leaves_bytes, 1), dtype=torch.uint8, device=DEVICE)


if __name__ == "__main__":
    main()
