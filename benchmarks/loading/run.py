"""How long an epoch of batches takes to reach the device: gathers, DataLoaders, and a plain copy.

python benchmarks/loading/run.py [--rounds 11] [--threads 1] [--quick] [--save]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

sys.path.insert(0, str(Path(__file__).parents[1]))
from interleaved import arguments, compare, measure, report

from flatout.data import DeviceDataset, PadCollate, RaggedArrays, prefetch
from flatout.hardware.host import read_host
from flatout.measure.batches import arrays_of

HERE = Path(__file__).parent
OURS = "flatout"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Records, how many make a batch, and the collate one would write for them."""

    arrays: RaggedArrays
    batch_size: int
    collate: Callable[[list[Any]], Any]


class Records(Dataset[dict[str, torch.Tensor]]):
    """Records as a dataset gives them: one by one, as tensors."""

    def __init__(self, arrays: RaggedArrays) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: torch.as_tensor(values) for name, values in self.arrays[index].items()}


def images(random: np.random.Generator, scale: int) -> Job:
    count = 250 * scale
    pixels = random.integers(0, 256, (count, 3, 64, 64), dtype=np.uint8)
    arrays = RaggedArrays({"image": pixels, "label": random.integers(0, 10, count)})
    return Job(arrays=arrays, batch_size=64, collate=default_collate)


def tokens(random: np.random.Generator, scale: int) -> Job:
    lengths = random.integers(8, 513, 500 * scale)
    starts = np.cumsum(lengths) - lengths
    flat = random.integers(1, 30000, int(lengths.sum()))
    arrays = RaggedArrays({"tokens": flat}, spans={"tokens": (starts, lengths)})
    return Job(arrays=arrays, batch_size=64, collate=pad_tokens)


def pad_tokens(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"tokens": pad_sequence([sample["tokens"] for sample in samples], batch_first=True)}


def rows(random: np.random.Generator, scale: int) -> Job:
    count = 1000 * scale
    arrays = RaggedArrays(
        {"x": random.random((count, 32), dtype=np.float32), "y": random.integers(0, 2, count)}
    )
    return Job(arrays=arrays, batch_size=256, collate=default_collate)


JOBS = {"images": images, "tokens": tokens, "rows": rows}


def epoch(batches: Iterable[Any], device: torch.device) -> Callable[[], None]:
    """Every batch of one epoch, on the device."""

    def run() -> None:
        for batch in batches:
            for values in arrays_of(batch):
                values.to(device, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def best_loader(
    job: Job, device: torch.device, make: Callable[..., Any], **more: Any
) -> tuple[Any, dict[str, Any]]:
    """The loader with the setting whose epoch is shortest."""
    cores = int(read_host().cores or 1)
    settings: list[dict[str, Any]] = [{"num_workers": 0}]
    for workers in sorted({2**i for i in range(cores.bit_length())} | {cores}):
        settings += [
            {"num_workers": workers, "prefetch_factor": factor, "persistent_workers": True}
            for factor in (2, 8)
        ]
    best: tuple[float, Any, dict[str, Any]] | None = None
    for setting in settings:
        loader = make(
            Records(job.arrays),
            batch_size=job.batch_size,
            shuffle=True,
            pin_memory=device.type == "cuda",
            **setting,
            **more,
        )
        run = epoch(loader, device)
        run()  # workers start, pages are read
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        if best is None or seconds < best[0]:
            best = (seconds, loader, setting)
        del loader, run  # and its workers with it, or the next setting shares the cores with them
    assert best is not None
    return best[1], best[2]


def copy_bytes(job: Job, device: torch.device) -> Callable[[], None]:
    batches = [
        values.pin_memory() if device.type == "cuda" else values
        for batch in DeviceDataset(job.arrays, device="cpu", batch_size=job.batch_size)
        for values in batch.values()
    ]
    targets = [torch.empty_like(values, device=device) for values in batches]

    def run() -> None:
        for target, source in zip(targets, batches, strict=True):
            target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def arms_of(job: Job, device: torch.device) -> tuple[dict[str, Callable[[], None]], dict[str, Any]]:
    plain, setting = best_loader(job, device, DataLoader, collate_fn=job.collate)
    padded, our_setting = best_loader(job, device, DataLoader, collate_fn=PadCollate())
    options: dict[str, Any] = {"device": device, "batch_size": job.batch_size}
    on_host = DeviceDataset(job.arrays, place="host", **options)
    arms = {
        OURS: epoch(DeviceDataset(job.arrays, **options), device),
        "flatout, on the host": epoch(on_host, device),
        "flatout, loader": epoch(prefetch(padded, device), device),
        "DataLoader": epoch(plain, device),
        "memcpy": copy_bytes(job, device),
    }
    settings = {"DataLoader": setting, "flatout, loader": our_setting}
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return arms, settings
    stateful, settings["torchdata"] = best_loader(job, device, StatefulDataLoader, collate_fn=job.collate)
    arms["torchdata"] = epoch(stateful, device)
    return arms, settings


def print_table(name: str, job: Job, row: dict[str, dict[str, float]], settings: dict[str, Any]) -> None:
    mib = job.arrays.num_bytes / 2**20
    print(f"\n{name}: {len(job.arrays)} records, {mib:.1f} MiB, {job.batch_size} per batch")
    print(f"{'arm':24} {'records/s':>12} {'ratio to flatout':>26} {'share of memcpy':>16}")
    for arm, found in row.items():
        interval = f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
        share = row["memcpy"]["seconds"] / found["seconds"]
        per_s = len(job.arrays) / found["seconds"]
        print(f"{arm:24} {per_s:12.0f} {interval:>26} {share:16.3f}  {settings.get(arm, '')}")


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(rounds=11)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rounds, scale = (3, 4) if options.quick else (options.rounds, 40)
    found: dict[str, Any] = {}
    for name, make in JOBS.items():
        job = make(np.random.default_rng(0), scale)
        arms, settings = arms_of(job, device)
        row = compare(measure(arms, rounds=rounds), ours=OURS)
        print_table(name, job, row, settings)
        found[name] = {"settings": settings, "arms": row}
    report("loading", {"device": device.type, "data": found}, folder=HERE, save=options.save)


if __name__ == "__main__":
    main()
