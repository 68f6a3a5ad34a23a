"""Become an unmodified script under watch: `python -m flatout.monitor.job.run_script OPTIONS`.

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
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from flatout.codec import decode, encode
from flatout.errors import FlatoutError
from flatout.monitor.sinks.choice import SinkChoice

MODULE = "flatout.monitor.job.run_script"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """The script, and how it is watched."""

    command: tuple[str, ...]  # the script or the module, then its arguments
    module: bool = False
    name: str | None = None
    hz: float = 1.0
    line: bool = True
    folder: str | None = None  # of runs
    sinks: SinkChoice = field(default_factory=SinkChoice)


def launch(options: LaunchOptions) -> NoReturn:
    """Become the script."""
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [sys.executable, "-m", MODULE, json.dumps(encode(options))]
    os.execv(sys.executable, arguments)


def main() -> None:
    """The entry of the process that `launch` became."""
    options = decode(LaunchOptions, json.loads(sys.argv[1]))
    target, *arguments = options.command
    sys.argv = [target, *arguments]
    if options.module:
        sys.path[0] = os.getcwd()
    else:
        sys.path[0] = str(Path(target).resolve().parent)
    sys.excepthook = _show_error
    interrupted: list[bool] = []
    atexit.register(_end_by_interrupt, interrupted)  # the first to be registered is the last to be called
    try:
        begin(options)
    except FlatoutError as error:
        _say(" ".join("; ".join(filter(None, (error.message, error.hint))).split()))
        raise SystemExit(error.exit_code) from None
    try:
        if options.module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except KeyboardInterrupt:
        interrupted.append(True)
        raise


def _end_by_interrupt(interrupted: list[bool]) -> None:
    """Let SIGINT end the process, as it ends a script alone: shells and schedulers look at that.

    CPython does so where the last source text that it ran was interrupted, which `-m` is not.  A signal sent
    from here would cut off what is still to come, such as the flush of the script's open files.
    """
    if interrupted:
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def begin(options: LaunchOptions) -> None:
    """Watch this process, and torch as soon as it is there; end the run with the process."""
    from flatout.monitor.job.watch import Watch, watch
    from flatout.monitor.sinks.choice import opened
    from flatout.runs import read_run, write_run

    stack = ExitStack()
    watched: Watch[Any] = watch(
        name=options.name or Path(options.command[0]).stem,
        hz=options.hz,
        line=options.line,
        listeners=_first_rank_only(options, stack, opened),
        folder=None if options.folder is None else Path(options.folder),
    )
    run = watched.run
    if run is None:
        return
    shown = (sys.executable, *(("-m",) if options.module else ()), *options.command)
    write_run(run.folder, replace(read_run(run.folder), command=shown))
    atexit.register(_end, run, stack)

    def on_torch(torch: ModuleType) -> None:
        from flatout.monitor.job.autopatch import install

        if not run.reporter.steps:  # else the script counts its steps already
            importlib.import_module("torch.utils.data")
            run.on_own_report = install(torch, run.reporter).undo

    sys.meta_path.insert(0, AfterImport("torch", on_torch))


def _first_rank_only(options: LaunchOptions, stack: ExitStack, opened: Callable[..., Any]) -> Sequence[Any]:
    """Of several ranks the first keeps the log; files of the others would be the same ones."""
    if os.environ.get("RANK", "0") != "0":
        return ()
    sinks: Sequence[Any] = stack.enter_context(opened(options.sinks, on_note=_say))
    return sinks


def _end(run: Any, stack: ExitStack) -> None:
    """The last words: what bounded the run, and where it is kept."""
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
        _say(f"the run is kept: flatout report {run.folder.name}")


def _say(message: str) -> None:
    from flatout.monitor.terminal.live_line import is_writable

    if is_writable(sys.stderr):  # without one, print would take stdout, which is the script's
        with contextlib.suppress(OSError):
            print(f"flatout: {message}", file=sys.stderr)


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls back when a package has been imported, whoever imports it; once."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    """Another loader, and a word after its work."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._then(module)


def _show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The script's own traceback: frames of what started it are nobody's business."""
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>")
        or trace.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main()
