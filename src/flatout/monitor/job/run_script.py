"""Become an unmodified script under watch.

`launch` does not start a child: it becomes the script's process.  So the script has the terminal, its
number is the one the shell knows, Ctrl-C and every other signal reach it alone, and its exit code is its
own, without anything in between that could get them wrong.

torch is watched from the moment the script itself imports it: importing it earlier would bind settings
(such as OMP_NUM_THREADS) that scripts make before their imports.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from flatout.ground.errors import FlatoutError
from flatout.ground.runs import RUN_FILE, end_of
from flatout.ground.script.main import after_import, run_as_main, show_error, start_command
from flatout.ground.torchrun import read_launch
from flatout.monitor.job.last_words import LastWords
from flatout.monitor.sinks.choice import SinkChoice, open_sinks

MODULE = "flatout.monitor.job.run_script"


def launch(
    command: Sequence[str],
    *,
    module: bool = False,
    name: str | None = None,
    hz: float = 1.0,
    folder: Path | None = None,
    sinks: SinkChoice | None = None,
) -> NoReturn:
    """Become the script (or module) and its arguments; `folder` holds the runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    options = {
        "command": list(command),
        "module": module,
        "name": name,
        "hz": hz,
        "folder": None if folder is None else str(folder.absolute()),
        "sinks": asdict(sinks or SinkChoice()),
    }
    os.execv(sys.executable, start_command(MODULE, json.dumps(options)))


def main(at_start: Collection[str]) -> None:
    """Run the script in the process that `launch` became."""
    options = json.loads(sys.argv[1])
    sys.argv = options["command"]
    interrupted: list[bool] = []
    atexit.register(_end_by_interrupt, interrupted)  # the first to be registered is the last to be called
    try:
        run = begin(**options)
    except FlatoutError as error:
        _say(error.line)
        raise SystemExit(error.exit_code) from None
    try:
        run_as_main(options["command"], module=options["module"], at_start=at_start)
    except BaseException as error:
        if run is not None:
            run.end = end_of(error)
        if not isinstance(error, SystemExit):
            show_error(error)
            sys.excepthook = lambda *_: None
        if isinstance(error, KeyboardInterrupt):
            interrupted.append(True)
        raise
    if run is not None:
        run.end = end_of(None)


def _end_by_interrupt(interrupted: list[bool]) -> None:
    """Let SIGINT end the process, as it ends a script alone: shells and schedulers look at that.

    CPython does so where the last source text that it ran was interrupted.  A signal sent from here would cut
    off what is still to come, such as the flush of the script's open files.
    """
    if interrupted:
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def begin(
    *,
    command: list[str],
    module: bool,
    name: str | None,
    hz: float,
    folder: str | None,
    sinks: dict[str, Any],
) -> Any:
    """Watch this process, and torch as soon as it is there; return the run, which ends with the process."""
    from flatout.monitor.job.watch import begin_run

    stack = ExitStack()
    listeners: Sequence[Any] = ()
    choice = SinkChoice(**sinks)
    if choice != SinkChoice() and read_launch().is_first:  # other ranks would write the same files
        listeners = stack.enter_context(open_sinks(choice, on_progress=_say))
    run = begin_run(
        name=name or Path(command[0]).stem,
        hz=hz,
        line=True,
        listeners=listeners,
        root=None if folder is None else Path(folder),
        command=(sys.executable, *(("-m",) if module else ()), *command),
    )
    if run is None:
        return None
    run.num_open += 1  # the script's own `with` does not end it
    with contextlib.suppress(OSError):
        stack.callback(LastWords(run.folder).close)
    atexit.register(_end, run, stack)

    def on_torch(torch: ModuleType) -> None:
        from flatout.monitor.job.autopatch import install

        if not run.reporter.steps:  # else the script counts its steps already
            importlib.import_module("torch.utils.data")
            run.on_own_report = install(torch, run.reporter).undo

    after_import("torch", on_torch)
    return run


def _end(run: Any, stack: ExitStack) -> None:
    """End the run; say what bounded it and where it is kept."""
    if os.getpid() != run.pid:  # a forked child has neither the threads nor the files to end
        return
    from flatout.monitor.job.watch import end_watching
    from flatout.monitor.verdicts.verdict import verdict

    samples = run.sampler.recent() if run.sampler is not None else ()
    end_watching()
    stack.close()
    if samples:
        found = verdict(samples)
        if found.bound != "unknown":
            _say(str(found))
    if (run.folder / RUN_FILE).is_file():
        _say(f"the run is kept: flatout report {run.folder.name}")
    else:
        _say(f"the run is not kept: {run.folder} was removed while the script ran")


def _say(message: str) -> None:
    from flatout.monitor.terminal.standing_line import is_writable

    if is_writable(sys.stderr):  # without one, print would take stdout, which is the script's
        with contextlib.suppress(OSError):
            print(f"flatout: {message}", file=sys.stderr)
