"""Two ranks on the CPU: what DDP and FSDP2 really hold.  As a script it prints what rank 0 saw as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, NUM_BLOCKS, NUM_CLASSES = 131, 3, 5  # odd, so that shards are padded
BATCH = 4
BUCKET_MIB = 0.1
NUM_WATCHED = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(x).relu())
        return x + down


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


class PartlyFrozen(Model):
    """One block trains a half of its parameters, the next one none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


def make_batch(batch_size: int) -> Tensor:
    return torch.randn(batch_size, WIDTH)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = model(batch).square().mean()
    return result


def watched_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> int:
    """The most bytes above those at its start that forward and backward of a step take."""
    from torch.profiler import ProfilerActivity, profile

    optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        loss(model, batch).backward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return peak_of(events)


# Gloo copies what it sends, and the CPU's chunk_cat too; on a GPU neither does.
OWN_COPIES = ("c10d::", "gloo:", "fsdp::chunk_cat")


def peak_of(events: list[dict[str, Any]]) -> int:
    """The most bytes held at once, without what collectives take for themselves."""
    spans = [
        (each["tid"], each["ts"], each["ts"] + each["dur"])
        for each in events
        if each.get("ph") == "X" and each["name"].startswith(OWN_COPIES)
    ]
    left_out: set[int] = set()
    held = peak = 0
    for each in sorted((each for each in events if each.get("name") == "[memory]"), key=lambda e: e["ts"]):
        num_bytes, address = each["args"]["Bytes"], each["args"]["Addr"]
        if num_bytes > 0 and any(
            tid == each["tid"] and start <= each["ts"] <= end for tid, start, end in spans
        ):
            left_out.add(address)
        elif num_bytes < 0 and address in left_out:
            left_out.remove(address)
        else:
            held += num_bytes
            peak = max(peak, held)
    return peak


def least_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> int:
    """Of several steps: a thread of the communication library may let go of a buffer a moment late."""
    return min(watched_step(model, optimizer, batch) for _ in range(NUM_WATCHED))


def ddp() -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Model(), bucket_cap_mb=BUCKET_MIB)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = make_batch(BATCH)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    data = model._get_ddp_logging_data()
    return {
        "bucket_sizes": [int(size) for size in str(data["bucket_sizes"]).split(",")],
        "rebuilt_bucket_sizes": [int(size) for size in str(data["rebuilt_bucket_sizes"]).split(",")],
        "bucket_bytes": data["bucket_cap_bytes"],
        "step_bytes": least_step(model, optimizer, batch),
    }


def fsdp2(model: Model) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    batch = make_batch(BATCH)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    parameters = list(model.parameters())
    trained = [each for each in parameters if each.grad is not None]
    gradients = [each.grad.to_local().untyped_storage() for each in trained]
    return {
        "parameters": [each.to_local().untyped_storage().nbytes() for each in parameters],
        "gradients": sorted({each.data_ptr(): each.nbytes() for each in gradients}.values()),
        "states": [
            optimizer.state[each][name].to_local().untyped_storage().nbytes()
            for each in trained
            for name in ("exp_avg", "exp_avg_sq")
        ],
        "step_bytes": least_step(model, optimizer, batch),
    }


def rank(number: int, store: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    found = {
        "ddp": ddp(),
        "fsdp2": fsdp2(Model()),
        "fsdp2 partly frozen": fsdp2(PartlyFrozen()),
    }
    dist.barrier()
    dist.destroy_process_group()
    if number == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    import torch.multiprocessing

    torch.multiprocessing.start_processes(rank, args=(sys.argv[1],), nprocs=2, start_method="fork")
