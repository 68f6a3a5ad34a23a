"""Put together what `flatout watch` needs: the job, the sampler, the sinks and the log.

Any process can be watched.  One that reports its steps is known by its channel; of any other there is what
the operating system and the driver say, and the verdict says what is missing.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from flatout.ground import OnProgress, ignore
from flatout.ground.errors import BadInput
from flatout.ground.interrupts import Interrupts
from flatout.ground.runs import (
    CHANNEL_FILE,
    RUN_FILE,
    Run,
    create_run,
    end_run,
    list_runs,
    process_key,
    process_started_s,
    read_run,
    state_of,
    this_run,
)
from flatout.hardware.visible import VARIABLE
from flatout.monitor.job.channel import find_channel
from flatout.monitor.past.history import HistoryWriter
from flatout.monitor.sampler import Sampler
from flatout.monitor.sinks.choice import SinkChoice, open_sinks

MACHINE = "machine"


@contextlib.contextmanager
def open_sampler(
    *,
    pid: int | None = None,
    hz: float = 1.0,
    log: Path | None = None,
    sinks: SinkChoice | None = None,
    on_progress: OnProgress = ignore,
) -> Iterator[Sampler]:
    """Yield a sampler that is not started; its log and sinks are complete when this ends.

    Without `pid` it watches the latest running job of the runs folder, if there is one.  `log` is a folder in
    which to keep a run.  SIGTERM and the loss of the terminal end it as Ctrl-C does: it has not died.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(Interrupts(hangup=True))
        kept: Path | None = None
        if pid is not None:
            scratch = log or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flatout-")))
            job: Path | None = folder_of(pid, scratch)
            if job is not None and job.parent == scratch:
                kept = job
        else:
            job = latest_job()
        sampler = Sampler(hz=hz, job=job)
        sampler.listeners += stack.enter_context(open_sinks(sinks or SinkChoice(), on_progress=on_progress))
        if log is not None:
            kept = kept or _own_folder(log, job)
            writer = HistoryWriter(kept)
            sampler.listeners.append(writer)
            stack.callback(_end, kept, writer)
            on_progress(f"the log is kept in {kept}")
        stack.callback(sampler.stop)
        yield sampler


def _own_folder(root: Path, job: Path | None) -> Path:
    name = MACHINE if job is None else read_run(job).name
    return _create(this_run(name, time_s=time.time()), root)


def _create(run: Run, root: Path) -> Path:
    try:
        return create_run(run, root)
    except OSError as error:
        hint = "--log DIR names another folder"
        raise BadInput(f"{root} cannot hold a log: {error.strerror}", hint=hint) from None


def _end(folder: Path, writer: HistoryWriter) -> None:
    with contextlib.suppress(OSError, BadInput):
        writer.close()
        end_run(folder, time_s=time.time())


def folder_of(pid: int, scratch: Path) -> Path:
    """Find the run of a process or of a child; if nothing reports, make a run in `scratch`.

    The number that a shell knows may be that of a launcher: `uv run`, `torchrun`, a script of commands.
    """
    folder = _reporting_folder(pid)
    if folder is not None:
        return folder
    try:
        process = psutil.Process(pid)
        name, started_s = process.name(), process_started_s(pid)
    except (psutil.Error, ValueError):  # a negative number names no process
        raise BadInput(f"process {pid} is not running", hint="flatout watch --list shows the runs") from None
    command: tuple[str, ...] = ()
    visible: str | None = None
    with contextlib.suppress(psutil.Error):
        command = tuple(process.cmdline())
        visible = process.environ().get(VARIABLE)
    run = Run(
        name=name,
        pid=pid,
        process_started_s=started_s,
        process_key=process_key(pid),
        started_s=time.time(),
        command=command,
        visible_devices=visible,
    )
    return _create(run, scratch)


def _reporting_folder(pid: int) -> Path | None:
    """Find the run that a process, else one of its children, reports; of several ranks the first."""
    started: list[int] = []
    with contextlib.suppress(
        psutil.Error, ValueError
    ):  # gone, not ours to look at, or no number of a process
        started = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    for numbers in ([pid], started):
        channels = (find_channel(number) for number in numbers)
        folders = {channel.parent for channel in channels if channel is not None}
        found = sorted(folder for folder in folders if (folder / RUN_FILE).exists())
        if found:
            return min(found, key=lambda folder: read_run(folder).rank or 0)
    return None


def latest_job() -> Path | None:
    """Find the running job of the runs folder that started last."""
    for folder, run in list_runs():
        # A log of the machine has no channel, because it is no job's; of several ranks the first speaks.
        is_job = (folder / CHANNEL_FILE).exists() and run.rank in (None, 0)
        if is_job and state_of(run) == "running":
            return folder
    return None
