"""The record that a job writes for a monitor, over and over into one small file, and how to read it.

The job writes totals since its start (steps, seconds per phase), never rates: the reader takes the difference
between two readings, and a reading that was missed loses nothing.  The file has two slots that are written in
turn, each with a checksum, so that a reader always finds a whole record, also after a job was killed in the
middle of one.  `reporter.py` writes them.

The reader may be another process.  It finds the file by the job's number: Linux lists what a process holds
open.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from flatout.ground.runs import read_regular
from flatout.measure import PHASES

SUFFIX = ".channel"
MAGIC = b"FOch"
VERSION = 3
SLOT_BYTES = 512
NUM_PHASES = len(PHASES)
# Scalars of a record, in order; unknown is not-a-number.
SCALARS = (
    "time_s",
    "steps",
    "samples",
    "ended",
    "sees_data",  # whether it times its waits for data; if not, nothing is known of them
    "loss",
    "learning_rate",
    "allocated_bytes",
    "reserved_bytes",
    "peak_allocated_bytes",
    "device_used_bytes",  # these two and the device's name: of a GPU that NVML does not know
    "device_total_bytes",
    "loss_is_nan",  # the job reported it: not the same as unknown
)
COUNTS = ("steps", "samples", *(name for name in SCALARS if name.endswith("_bytes")))
TEXT_BYTES = 40
LAYOUT = struct.Struct(f"<4sHxxQ{len(SCALARS) + 2 * NUM_PHASES}d{TEXT_BYTES}s{TEXT_BYTES}s")
CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A record as it was read; seconds are totals since the job began to report."""

    number: int
    time_s: float
    steps: int
    samples: int | None
    ended: bool
    sees_data: bool
    loss: float | None
    learning_rate: float | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_allocated_bytes: int | None
    device_used_bytes: int | None
    device_total_bytes: int | None
    host_s: dict[str, float]
    device_s: dict[str, float] | None
    gpu_uuid: str | None
    device_name: str | None


def read_channel(path: Path) -> JobRecord | None:
    """Read the latest whole record; None if there is none yet."""
    try:
        data = read_regular(path, most_bytes=2 * SLOT_BYTES)
    except OSError:
        return None
    slots = [_parse(data[offset : offset + SLOT_BYTES]) for offset in (0, SLOT_BYTES)]
    return max((slot for slot in slots if slot is not None), key=lambda slot: slot.number, default=None)


def _parse(slot: bytes) -> JobRecord | None:
    size = LAYOUT.size
    if len(slot) < size + CHECKSUM.size:
        return None
    (checksum,) = CHECKSUM.unpack_from(slot, size)
    if zlib.crc32(slot[:size]) != checksum:
        return None
    magic, version, number, *values, gpu_id, device_name = LAYOUT.unpack_from(slot)
    if magic != MAGIC or version != VERSION:
        return None
    known = {
        name: value if math.isfinite(value) else None for name, value in zip(SCALARS, values, strict=False)
    }
    loss = values[SCALARS.index("loss")]
    if known.pop("loss_is_nan") or math.isinf(loss):
        known["loss"] = loss
    whole = {name: None if (value := known[name]) is None else int(value) for name in COUNTS}
    host_s = dict(zip(PHASES, values[len(SCALARS) :], strict=False))
    device = values[len(SCALARS) + NUM_PHASES :]
    return JobRecord(
        **{
            **known,
            **whole,
            "number": number,
            "time_s": known["time_s"] or 0.0,
            "steps": whole["steps"] or 0,
            "ended": bool(known["ended"]),
            "sees_data": bool(known["sees_data"]),
            "host_s": host_s,
            "device_s": None if math.isnan(device[0]) else dict(zip(PHASES, device, strict=True)),
            "gpu_uuid": _text(gpu_id),
            "device_name": _text(device_name),
        }
    )


def _text(data: bytes) -> str | None:
    return data.rstrip(b"\0").decode("ascii", errors="replace") or None


def find_channel(pid: int) -> Path | None:
    """Find the channel that a process holds open; None if it has none or hides its files."""
    try:
        names = sorted(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    for name in names:
        try:
            target = os.readlink(name)
        except OSError:
            continue
        if target.endswith(SUFFIX):
            return Path(target)
    return None
