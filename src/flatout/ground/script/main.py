"""Run a user's script as Python itself would, inside a process that also does other work.

A script notices how it was started: by `__file__` and the other names of its module, by `sys.path`, by what
is imported already, by the frames in its tracebacks.  `runpy.run_path` differs from `python script.py` in
most of these.  So the process starts with nothing of the user's folder on its path (`start_command`), then
becomes the script (`run_as_main`).  torch is not imported for it: what a script sets before its imports must
count.

What stays different: a few frames below the script's first, and the imported modules of this package.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pkgutil
import runpy
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

PACKAGE = Path(__file__).parents[2]
# Frames that a user's error never has without us; flatout.data and the like are called by the user.
OWN_CODE = (__file__, *(str(PACKAGE / room) + os.sep for room in ("measure", "monitor/job", "tuner")))
# `-m` would import this package's needs from the working folder, and `-c` puts that on the path as "".
START = (
    "import sys; at_start = frozenset(sys.modules); sys.path[:] = [each for each in sys.path if each]; "
    "from {module} import main; main(at_start)"
)


def start_command(module: str, argument: str) -> list[str]:
    """Return the command that calls `main(at_start)` of a module, with Python's own options.

    `at_start` are the names of the modules that a plain script finds imported.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.__stdout__, "write_through", False) and not os.environ.get("PYTHONUNBUFFERED"):
        flags.append("-u")
    return [sys.executable, *flags, "-c", START.format(module=module), argument]


def run_as_main(command: Sequence[str], *, module: bool, at_start: Collection[str]) -> None:
    """Become `python command` or `python -m command`; what the script raises is raised."""
    target = command[0]
    sys.argv = ["-m", *command[1:]] if module else list(command)  # a module's first becomes its path
    sys.orig_argv = [*sys.orig_argv[:-3], *(("-m",) if module else ()), *command]
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # else multiprocessing will find the script as it is imported
        sys.modules["__mp_main__"] = main
    run_module: Callable[..., object] = runpy._run_module_as_main  # type: ignore[attr-defined]
    if module:
        _begin_path(os.getcwd(), at_start=at_start)
        run_module(target)
    elif pkgutil.get_importer(target) is not None:  # a folder or an archive with a __main__ in it
        sys.path.insert(0, target)
        run_module("__main__", False)
    else:
        _begin_path(os.path.dirname(os.path.realpath(target)), at_start=at_start)
        path = os.path.join(os.getcwd(), target)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        vars(main).update(__file__=path, __cached__=None, __loader__=loader)
        exec(read_code(path), vars(main))


def read_code(path: str) -> CodeType:
    """Read the code of a script, as source or as bytecode."""
    source = importlib.machinery.SourceFileLoader("__main__", path).get_data(path)
    if source.startswith(importlib.util.MAGIC_NUMBER):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
        assert code is not None
        return code
    return compile(source, path, "exec", dont_inherit=True)


def _begin_path(folder: str, *, at_start: Collection[str]) -> None:
    """Put a folder first on the path, and let its modules go before those that were imported meanwhile."""
    if sys.flags.safe_path:
        return
    sys.path.insert(0, folder)
    later = {name.partition(".")[0] for name in sys.modules} - {*at_start, PACKAGE.name, "__main__"}
    for name in later:
        if _is_hidden_by(folder, name):
            for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                del sys.modules[loaded]


def _is_hidden_by(folder: str, name: str) -> bool:
    importers = (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter)
    if any(importer.find_spec(name) is not None for importer in importers):
        return False
    spec = importlib.machinery.PathFinder.find_spec(name, [folder])
    if spec is None or spec.loader is None:  # a folder without __init__.py hides nothing
        return False
    return spec.origin != getattr(sys.modules.get(name), "__file__", None)


def show_error(error: BaseException) -> None:
    """Show an error that ends the script by the script's own hook, without frames of ours."""
    leave_out_own_frames(error)
    sys.excepthook(type(error), error, error.__traceback__)


def leave_out_own_frames(error: BaseException | None) -> None:
    """Drop our frames from the tracebacks of an error, of its causes and of the errors it groups."""
    seen: set[int] = set()
    found = [error]
    while found:
        each = found.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        kept: TracebackType | None = None
        for trace in reversed(list(_traces(each.__traceback__))):
            if not _is_own(trace):
                kept = TracebackType(kept, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
        each.__traceback__ = kept
        found += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(trace: TracebackType) -> bool:
    frame = trace.tb_frame
    return frame.f_code.co_filename.startswith(OWN_CODE) or frame.f_globals.get("__name__") == "runpy"


def after_import(name: str, then: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call `then` with a package once anything has imported it; return a function that cancels this."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        then(loaded)
        return lambda: None
    finder = AfterImport(name, then)
    sys.meta_path.insert(0, finder)
    return finder.leave


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls back once, when a package has been imported; finding it without importing still works."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then
        self._is_asking = False

    def leave(self) -> None:
        with contextlib.suppress(ValueError):  # done, or somebody made a list of their own
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            own = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)  # gone already, if several wait for one package
                own(module)
                self.leave()
                self._then(module)

            loader.exec_module = exec_module
        return spec
