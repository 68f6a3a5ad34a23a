"""A run's folder: what it is called, who it belongs to, whether it is still going.

.flatout/runs/20261115-143002-train-4711/
    run.json         whose run it is; written once, with its end when that is known
    job.channel      what the job reports at present
    raw-000001.jsonl …, minutes-…, hours-…    the log, see history.py
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from flatout.codec import WrongShape, decode, encode
from flatout.errors import BadInput
from flatout.hardware.visible import VARIABLE

RUN_VERSION = 1
FORMAT = "flatout-run"
VARIABLE_OF_RUNS = "FLATOUT_RUNS"
RUN_FILE = "run.json"
CHANNEL_FILE = "job.channel"
LONGEST_NAME = 40

RunState = Literal["running", "ended", "died"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Whose run it is."""

    name: str
    pid: int
    process_started_s: float | None  # tells the process from a later one with the same number
    started_s: float
    command: tuple[str, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES; None: it is not set
    ended_s: float | None = None


def runs_folder() -> Path:
    """Where runs are kept: $FLATOUT_RUNS, or .flatout/runs of the working folder."""
    chosen = os.environ.get(VARIABLE_OF_RUNS)
    if chosen:
        return Path(chosen)
    if os.access(Path.cwd(), os.W_OK):
        return Path.cwd() / ".flatout" / "runs"
    return Path(tempfile.gettempdir()) / "flatout" / "runs"


def this_run(name: str | None = None, *, time_s: float) -> Run:
    """The run of this process."""
    command = tuple(getattr(sys, "orig_argv", sys.argv))
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    rank, world_size = (_number(os.environ.get(key)) for key in ("RANK", "WORLD_SIZE"))
    return Run(
        name=name or script.lstrip("-") or "job",
        pid=os.getpid(),
        process_started_s=process_started_s(os.getpid()),
        started_s=time_s,
        command=command,
        rank=rank,
        world_size=world_size,
        visible_devices=os.environ.get(VARIABLE),
    )


def create_run(run: Run, root: Path | None = None) -> Path:
    """Make the folder of a run and write whose it is; OSError where that cannot be."""
    started = datetime.datetime.fromtimestamp(run.started_s).strftime("%Y%m%d-%H%M%S")
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", run.name).strip("-.")[:LONGEST_NAME] or "job"
    root = root or runs_folder()
    root.mkdir(parents=True, exist_ok=True)
    name = f"{started}-{plain}-{run.pid}"
    for number in itertools.count(1):  # a process may begin two runs in one second
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        break
    write_run(folder, run)
    return folder


def write_run(folder: Path, run: Run) -> None:
    temporary = folder / f".{RUN_FILE}.{os.getpid()}"
    document = {"format": FORMAT, "version": RUN_VERSION, **encode(run)}
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / RUN_FILE)


def end_run(folder: Path, *, time_s: float) -> None:
    write_run(folder, replace(read_run(folder), ended_s=time_s))


def read_run(folder: Path) -> Run:
    """Whose run a folder holds; BadInput where it holds none."""
    path = folder / RUN_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{folder} holds no run: {error}", hint="flatout watch --list shows the runs"
        ) from None
    version = data.get("version") if isinstance(data, dict) and data.get("format") == FORMAT else None
    if not isinstance(version, int) or version > RUN_VERSION:
        raise BadInput(f"{path} has version {version}; this flatout reads up to {RUN_VERSION}")
    try:
        return decode(Run, data)
    except WrongShape as error:
        raise BadInput(f"{path} is damaged: {error}") from None


def state_of(run: Run) -> RunState:
    if run.ended_s is not None:
        return "ended"
    return "running" if is_alive(run.pid, run.process_started_s) else "died"


def list_runs(root: Path | None = None) -> tuple[tuple[Path, Run], ...]:
    """Every readable run, the latest first."""
    folder = root or runs_folder()
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            found.append((path, read_run(path)))
        except BadInput:
            continue
    return tuple(sorted(found, key=lambda pair: pair[1].started_s, reverse=True))


def find_run(wanted: str, root: Path | None = None) -> Path:
    """A folder given as a path, as its name, or as the part of its name that tells it from the others."""
    if (Path(wanted) / RUN_FILE).is_file():
        return Path(wanted)
    runs = [path for path, _ in list_runs(root)]
    exact = [path for path in runs if path.name == wanted]
    matching = exact or [path for path in runs if wanted and wanted in path.name]
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(path.name for path in (matching or runs)[:5]) or "none"
    problem = "names several runs" if matching else "names no run"
    raise BadInput(f"{wanted!r} {problem} of {root or runs_folder()}", hint=f"there are: {known}")


def process_started_s(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def is_alive(pid: int, started_s: float | None) -> bool:
    """Whether the process still runs that started at `started_s`; a zombie does not."""
    try:
        process = psutil.Process(pid)
        same = started_s is None or abs(process.create_time() - started_s) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
