"""Where an estimate and the GPU part: the allocator's record of a step beside the trace, block by block.

    python benchmarks/memory/allocator_record.py                          # on a GPU, under five minutes
    python benchmarks/memory/allocator_record.py --set unseen-third --only pointing,warped

Each kind that misses has a configuration in `KINDS`.  A child traces it without a GPU, then steps it twice
for real while PyTorch's allocator writes down what it does, with the Python line of every allocation.
Printed are

    peak     what is held at the highest moment of either and not of the other, by size, with its origin
    events   the births of the first step in order: those that only one side has, where they stand

Blocks below `--smallest` bytes are left out; with `--whole` the file has all of the GPU's births and deaths
in both steps, so that they can be simulated and looked at without a GPU.  Measure a set before its kinds
are recorded: what was recorded has been looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a parent with a CUDA context could not fork

sys.path[0] = str(Path(__file__).resolve().parents[2])
from benchmarks.memory.children import Pool, Task  # noqa: E402
from benchmarks.memory.configuration import Configuration  # noqa: E402
from benchmarks.memory.configurations import SETS  # noqa: E402
from benchmarks.memory.estimates import DEVICE  # noqa: E402
from benchmarks.memory.preparation import import_everything, versions, write  # noqa: E402

MIB = 2**20
BLOCK = 512  # bytes that the allocator rounds up to
MAX_EVENTS = 1_000_000
# what misses -> the label of a configuration that has it
KINDS: dict[str, str] = {
    "narrow recurrent layers": "sensors/batch128/length256/fp32",
    "narrow recurrent layers, half": "sensors/batch256/length200/bf16",
    "cells in a loop": "pointing/batch64/length256/fp32",
    "gradient of a gradient": "critic/batch64/image64/fp32",
    "gradient of a gradient, inner loop": "inner-loop/batch64/fp32",
    "patches of time series": "series-patches/batch64/length512/fp32",
    "1-D convolutions with group norm": "trajectories/batch256/length256/bf16",
    "channels-last convolutions in fp32": "squeezed/batch64/image128/fp32",
    "tables of relative positions": "relative-places/batch16/length384/fp32",
}


class Block(NamedTuple):
    """One allocation: rounded bytes, and where it comes from."""

    num_bytes: int
    origin: str


class Log(NamedTuple):
    """Births of the first step in order, what is held at the peak of all steps, and the peak itself.

    `whole` has every birth and death of the GPU's steps, and the place where the second step begins.
    """

    births: list[Block]
    at_peak: list[Block]
    peak_bytes: int
    reserved_bytes: int
    whole: dict[str, Any] | None = None


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def predicted_log(configuration: Configuration) -> Log:
    from flatout.memory.predict.forecast import Forecaster

    forecaster = Forecaster(configuration.job, device=DEVICE)
    found = forecaster.estimate(configuration.recipe)
    trace = forecaster.trace(configuration.recipe, configuration.job.sizes)
    start = min(at for at, _, _ in trace.marks)
    later = [at for at, step, _ in trace.marks if step == "next"]
    blocks = [
        Block(rounded(each.num_bytes), f"{each.phase}: {each.op}, {each.module or each.component}")
        for each in trace.storages
    ]
    events = [(int(event) if event >= 0 else int(~event), event >= 0) for event in trace.events]
    births = [blocks[number] for number, born in events[start : min(later, default=len(events))] if born]
    at_peak = held_at_peak([(number, born, blocks[number]) for number, born in events])
    return Log(births, at_peak, found.peak_allocated_bytes, found.peak_reserved_bytes)


def recorded_log(configuration: Configuration) -> Log:
    import torch

    from benchmarks.memory.measurement import set_precision, set_up, steps

    set_precision(configuration)
    parts, batch = set_up(configuration, batch_size=configuration.batch_size)
    held = [
        (-1 - number, True, Block(block["size"], "before the first step"))
        for number, block in enumerate(
            block
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )
    ]
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_EVENTS)
    steps(configuration, parts, batch, count=1)
    num_first = len(_events(torch))
    steps(configuration, parts, batch, count=1)
    events = _events(torch)
    torch.cuda.memory._record_memory_history(None)
    numbered = list(_numbered(events))
    births = [block for _, born, block in numbered[:num_first] if born]
    stats = torch.cuda.memory_stats()
    return Log(
        births,
        held_at_peak([*held, *numbered]),
        stats["allocated_bytes.all.peak"],
        stats["reserved_bytes.all.peak"],
        whole_log([*held, *numbered], second=len(held) + num_first),
    )


def whole_log(events: Sequence[tuple[int, bool, Block]], *, second: int) -> dict[str, Any]:
    """Return events as numbers, n for the birth of block n and ~n for its death, and what the blocks are.

    Rows of numbers are strings, so that the file stays small.
    """
    numbers: dict[int, int] = {}
    origins: dict[str, int] = {}
    log, num_bytes, came_from = [], [], []
    for number, born, block in events:
        if born:
            numbers[number] = len(num_bytes)
            num_bytes.append(block.num_bytes)
            came_from.append(origins.setdefault(block.origin, len(origins)))
        log.append(numbers[number] if born else ~numbers[number])
    rows = {"events": log, "bytes": num_bytes, "origin": came_from}
    return {
        **{name: " ".join(map(str, row)) for name, row in rows.items()},
        "origins": list(origins),
        "second": second,
    }


def _events(torch: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return [event for event in events if event["action"] in ("alloc", "free_completed")]


def _numbered(events: Sequence[dict[str, Any]]) -> Iterator[tuple[int, bool, Block]]:
    """Births and deaths by number; what was born before the record has no death here."""
    alive: dict[int, tuple[int, Block]] = {}
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            alive[event["addr"]] = (number, Block(rounded(event["size"]), origin_of(event.get("frames", []))))
            yield number, True, alive[event["addr"]][1]
        elif event["addr"] in alive:
            born, block = alive.pop(event["addr"])
            yield born, False, block


def origin_of(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost line, and the innermost one of the models."""
    shown = [f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in frames]
    own = [text for frame, text in zip(frames, shown, strict=True) if "families" in frame["filename"]]
    return " < ".join(dict.fromkeys([*shown[:1], *own[:1]])) or "a thread without Python"


def held_at_peak(events: Sequence[tuple[int, bool, Block]]) -> list[Block]:
    total = most = 0
    at = 0
    for place, (_, born, block) in enumerate(events):
        total += block.num_bytes if born else -block.num_bytes
        if total > most:
            most, at = total, place
    held: dict[int, Block] = {}
    for number, born, block in events[: at + 1]:
        if born:
            held[number] = block
        else:
            held.pop(number, None)
    return list(held.values())


def compare_kind(configuration: Configuration, smallest: int, whole: bool) -> dict[str, Any]:
    """Both logs and where they part, as lines."""
    predicted = predicted_log(configuration)
    recorded = recorded_log(configuration)
    return {
        "predicted": {"allocated": predicted.peak_bytes, "reserved": predicted.reserved_bytes},
        "measured": {"allocated": recorded.peak_bytes, "reserved": recorded.reserved_bytes},
        "peak": list(peak_differences(predicted.at_peak, recorded.at_peak, smallest=smallest)),
        "events": list(event_differences(predicted.births, recorded.births, smallest=smallest)),
        **({"whole": recorded.whole} if whole else {}),
    }


def peak_differences(
    predicted: Sequence[Block], recorded: Sequence[Block], *, smallest: int
) -> Iterator[str]:
    """By size: how many more blocks one side holds at its peak, with the origins of that side."""
    counts = [Counter(block.num_bytes for block in side) for side in (predicted, recorded)]
    for num_bytes in sorted(set(counts[0]) | set(counts[1]), reverse=True):
        more = counts[1][num_bytes] - counts[0][num_bytes]
        if not more or num_bytes < smallest:
            continue
        side, name = (recorded, "GPU") if more > 0 else (predicted, "trace")
        origins = Counter(block.origin for block in side if block.num_bytes == num_bytes)
        said = "; ".join(f"{count} x {origin}" for origin, count in origins.most_common(3))
        yield f"{name:<5} holds {abs(more):3} more of {num_bytes / MIB:9.3f} MiB  ({said})"


def event_differences(
    predicted: Sequence[Block], recorded: Sequence[Block], *, smallest: int
) -> Iterator[str]:
    """Births that only one side has, in their order."""
    sides = [[block for block in side if block.num_bytes >= smallest] for side in (predicted, recorded)]
    sizes = [[block.num_bytes for block in side] for side in sides]
    for tag, a, b, c, d in SequenceMatcher(None, *sizes, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        yield f"at birth {c} of {len(sides[1])}:"
        yield from (f"  - trace {block.num_bytes / MIB:9.3f} MiB  {block.origin}" for block in sides[0][a:b])
        yield from (f"  + GPU   {block.num_bytes / MIB:9.3f} MiB  {block.origin}" for block in sides[1][c:d])


def chosen(arguments: argparse.Namespace) -> dict[str, Configuration]:
    every = [each for name in arguments.set.split(",") for each in SETS[name]()]
    if arguments.only:
        named = arguments.only.split(",")
        return {each.label: each for each in every if any(name in each.label for name in named)}
    words = arguments.kinds.split(",")
    wanted = {kind: label for kind, label in KINDS.items() if any(word in kind for word in words)}
    return {
        kind: next(each for each in every if each.label.startswith(label)) for kind, label in wanted.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", default="unseen-third", help="where configurations are looked for: a,b")
    parser.add_argument("--kinds", default="", help="kinds that contain one of these words: a,b")
    parser.add_argument(
        "--only", help="configurations whose label contains one of these, instead of kinds: a,b"
    )
    parser.add_argument("--smallest", type=int, default=MIB // 4, help="bytes of a block that is shown")
    parser.add_argument("--most", type=int, default=60, help="lines of events for each kind")
    parser.add_argument("--seconds", type=float, default=280.0, help="start nothing after this long")
    parser.add_argument("--width", type=int, default=1, help="children at a time")
    parser.add_argument("--whole", action="store_true", help="every birth and death in the file too")
    parser.add_argument("--out", help="JSON file with all lines, rewritten after every kind")
    arguments = parser.parse_args()
    import_everything()
    configurations = chosen(arguments)
    tasks: list[Task] = [
        (kind, compare_kind, (each, arguments.smallest, arguments.whole))
        for kind, each in configurations.items()
    ]
    rows = []
    with Pool(width=arguments.width, limit_s=90) as pool:
        for kind, answer in pool.run(tasks, deadline=time.monotonic() + arguments.seconds):
            rows.append({"kind": kind, "label": configurations[kind].label, **answer})
            show(rows[-1], most=arguments.most)
            if arguments.out:
                write(Path(arguments.out), {"versions": versions(), "rows": rows})
    print(json.dumps({row["kind"]: row.get("measured", row.get("error")) for row in rows}))
    return 0 if rows and all("error" not in row for row in rows) else 1


def show(row: dict[str, Any], *, most: int) -> None:
    print(f"\n== {row['kind']}: {row['label']}")
    if "error" in row:
        print(f"FAILED {row['error']}", flush=True)
        return
    for name in ("allocated", "reserved"):
        said, real = row["predicted"][name], row["measured"][name]
        print(
            f"{name:<10} predicted {said / MIB:10.1f} MiB, measured {real / MIB:10.1f} {said / real - 1:+.2%}"
        )
    print("peak:", *(row["peak"] or ["  the same blocks"]), sep="\n  ")
    lines = row["events"]
    left_out = [f"... {len(lines) - most} lines more (--most)"] if len(lines) > most else []
    print("events:", *(lines[:most] or ["  the same births"]), *left_out, sep="\n  ", flush=True)


if __name__ == "__main__":
    sys.exit(main())
