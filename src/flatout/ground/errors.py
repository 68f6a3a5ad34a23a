"""Every error Flatout raises on purpose.

    FlatoutError                 exit code 2: the tool could not do its work
    ├── BadInput                 a path, flag or value the user gave cannot be used
    │   ├── EvidenceUnreadable   an Evidence file that is cut, foreign or of a newer version
    │   ├── UnknownDevice        a device name that no datasheet knows
    │   └── NotFetched           a package that is not in the cache and could not be fetched
    ├── BatchDoesNotFit          not even the smallest batch fits the memory that is free
    ├── MissingExtra             an optional package is not installed
    ├── Interrupted              exit code 130: the user ended the work; what was known is kept
    ├── ChildDied                a process that was asked for an answer ended without one
    ├── ForkUnusable             a forked process can use neither CUDA nor autograd; a fresh one can
    ├── StructureChanges         a step allocates in another way at other sizes: it must be traced there
    └── NothingMeasured          the job ran, but gave no step to measure
        └── ScriptFailed         the job raised before it could be measured

A message names the value, the limit and the next thing to do; `hint` holds that last part.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType

LONGEST_LINE = 300


class FlatoutError(Exception):
    """The root of the tree; `exit_code` is what the command line ends with."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    @property
    def line(self) -> str:
        """The message and the hint as a command prints them, on one line."""
        return " ".join("; ".join(filter(None, (self.message, self.hint))).split())


class BadInput(FlatoutError):
    """A path, flag or value the user gave cannot be used."""


class EvidenceUnreadable(BadInput):
    """An Evidence file that is cut, foreign or of a newer version."""


class UnknownDevice(BadInput):
    """A device name that no datasheet knows."""


class NotFetched(BadInput):
    """A package that is not in the cache and could not be fetched."""


class BatchDoesNotFit(FlatoutError):
    """Not even the smallest batch fits the memory that is free."""


class MissingExtra(FlatoutError):
    """An optional package is not installed."""


class Interrupted(FlatoutError):
    """The user ended the work; what was known is kept."""

    exit_code = 130  # what a shell makes of any program that Ctrl-C ended


class ChildDied(FlatoutError):
    """A process that was asked for an answer ended without one."""


class ForkUnusable(FlatoutError):
    """The parent has used CUDA, or autograd on a machine with a GPU, so a forked child cannot."""


class StructureChanges(FlatoutError):
    """A step allocates in another way at other sizes: it must be traced there."""


class NothingMeasured(FlatoutError):
    """The job ran, but gave no step to measure."""


class ScriptFailed(NothingMeasured):
    """The job raised before it could be measured."""


def import_extra(module: str, *, extra: str) -> ModuleType:
    """Import an optional module, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".")[0] == error.name.split(".")[0]:
            raise MissingExtra(
                f"the package {error.name!r} is not installed", hint=f"pip install 'flatout[{extra}]'"
            ) from error
        raise


def near_hint(name: str, known: Iterable[str], listed: Iterable[str] = ()) -> str:
    """Ask whether the nearest of the known names was meant; else list them, or what is `listed`."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(listed or names)}"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, cut: PyTorch lists every backend in one line."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an interrupt caused an error: a library that cleans up may raise its own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
