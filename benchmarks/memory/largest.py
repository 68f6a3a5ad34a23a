"""The largest batch that really trains under a cap, found around a predicted one."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.memory.accuracy import PREDICTED
from benchmarks.memory.configuration import Configuration
from benchmarks.memory.measurement import forget, set_precision, set_up, steps

NUM_STEPS = 3


class Trials:
    """Which batch sizes train, each tried once, in one process with a capped allocator."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.tried: dict[int, dict[str, Any]] = {}

    def trains(self, batch_size: int) -> bool:
        if batch_size not in self.tried:
            self.tried[batch_size] = self._try(batch_size)
        return bool(self.tried[batch_size]["trains"])

    def _try(self, batch_size: int) -> dict[str, Any]:
        forget()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        parts = batch = None
        try:
            parts, batch = set_up(self.configuration, batch_size=batch_size)
            steps(self.configuration, parts, batch, count=NUM_STEPS)
        except torch.OutOfMemoryError:
            return {"trains": False}
        stats = torch.cuda.memory_stats()
        return {
            "trains": True,
            "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
            "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
            "num_alloc_retries": stats["num_alloc_retries"] - before,
        }


def search(configuration: Configuration, prediction: dict[str, int], limit_s: float) -> dict[str, Any]:
    """Try the predicted batches, then close in on the border to one sample or 1 %."""
    start = time.monotonic()
    assert configuration.cap_bytes is not None
    set_precision(configuration)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, configuration.cap_bytes / total))
    trials = Trials(configuration)
    predicted = {name: prediction.get(name) for name in PREDICTED}
    for batch_size in predicted.values():
        if batch_size is not None and batch_size >= 1:
            trials.trains(batch_size)
    largest, fails_at = bracket(
        trials.trains,
        guess=predicted["limit"] or predicted["safe"] or configuration.batch_size,
        may_go_on=lambda: time.monotonic() - start < limit_s,
    )
    return {
        "cap_bytes": configuration.cap_bytes,
        **predicted,
        "largest": largest,
        "fails_at": fails_at,
        **{
            f"{name}_trains": trials.tried.get(batch_size or 0, {}).get("trains")
            for name, batch_size in predicted.items()
        },
        "tried": {str(size): found for size, found in sorted(trials.tried.items())},
        "seconds": time.monotonic() - start,
    }


def bracket(trains: Any, *, guess: int, may_go_on: Any) -> tuple[int, int | None]:
    """(largest that trains, smallest that was seen to fail): outwards from the guess, then by halves."""
    guess = max(1, guess)
    largest, fails_at, width = 0, None, max(1, guess // 32)
    size = guess
    while may_go_on():
        if trains(size):
            largest = max(largest, size)
        else:
            fails_at = size if fails_at is None else min(fails_at, size)
        if fails_at is not None and (fails_at - largest <= max(1, largest // 100) or fails_at == 1):
            break
        if fails_at is None:
            size, width = largest + width, 2 * width
        elif largest == 0:
            size, width = max(1, fails_at - width), 2 * width
        else:
            size = (largest + fails_at) // 2
    return largest, fails_at
