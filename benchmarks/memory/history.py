"""The sequence of allocations of two steps, compact, for comparing a trace with the truth birth by birth.

For each configuration the npz file has, under `<label>/`:

    actions     one number per event, an index into ACTIONS
    sizes       requested bytes of the event
    births      of a free: which alloc of this log it ends, counted from 0; -1: older than the log
    num_first   events of the first step; the rest belongs to the second
    blocks      what the allocator holds when the first step starts: bytes of each block, negative if free
    segments    how many of `blocks` each segment has
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.memory.configuration import Configuration
from benchmarks.memory.measurement import forget, set_up, steps

ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
)
MAX_EVENTS = 1_000_000


def record(configuration: Configuration) -> dict[str, Any]:
    """Two steps of the job, built afresh, with the allocator writing down what it does."""
    forget()
    parts, batch = set_up(configuration, batch_size=configuration.batch_size)
    blocks, segments = _layout()
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MAX_EVENTS)
    steps(configuration, parts, batch, count=1)
    num_first = len(_events())
    steps(configuration, parts, batch, count=1)
    events = _events()
    torch.cuda.memory._record_memory_history(None)
    return {"num_first": np.int64(num_first), "blocks": blocks, "segments": segments, **compact(events)}


def compact(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Addresses become numbers of births: nothing of one process's memory map stays in the file."""
    born: dict[int, int] = {}
    births, num_births = [], 0
    for event in events:
        if event["action"] == "alloc":
            born[event["addr"]] = num_births
            births.append(num_births)
            num_births += 1
        else:
            births.append(born.get(event["addr"], -1) if event["action"].startswith("free") else -1)
    return {
        "actions": np.array([ACTIONS.index(event["action"]) for event in events], dtype=np.uint8),
        "sizes": np.array([event["size"] for event in events], dtype=np.int64),
        "births": np.array(births, dtype=np.int32),
    }


def _events() -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return [event for event in events if event["action"] in ACTIONS and "addr" in event]


def _layout() -> tuple[Any, Any]:
    blocks, segments = [], []
    for segment in torch.cuda.memory_snapshot():
        segments.append(len(segment["blocks"]))
        blocks += [
            block["size"] if block["state"] == "active_allocated" else -block["size"]
            for block in segment["blocks"]
        ]
    return np.array(blocks, dtype=np.int64), np.array(segments, dtype=np.int32)


def append_history(path: Path, label: str, history: dict[str, Any]) -> int:
    """Into an npz file that `numpy.load` reads, one configuration at a time; the number of events."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, array in history.items():
            content = io.BytesIO()
            np.save(content, np.asarray(array), allow_pickle=False)
            archive.writestr(f"{label}/{name}.npy", content.getvalue())
    return len(history["actions"])
