"""Which line of the user's code is responsible for the current call?

Some Python frame calls a tensor operation, and that frame often belongs to a library: the user wrote
`self.encoder(x)` and a line of `torch/nn/modules/transformer.py` caused the sync.  The line worth showing is
the innermost one that the user can edit; the library line it went through (`via`) explains the call.  User
code is everything outside the standard library, site-packages and this package; a virtual environment inside
the project folder is a library like any other.

This runs inside every counted operation, so each code object is judged once.  The caches are keyed by
`id(code)` and keep the code object alive: code objects compare equal across files and hash slowly.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

from flatout.measure.evidence import Place

_USER, _LIBRARY, _SKIPPED = 0, 1, 2

_PACKAGE_ROOT = os.path.realpath(Path(__file__).parents[1]) + os.sep
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
# The file name of executed text.  Libraries use other names, except dataclasses and named tuples.
_TEXT = "<string>"
_GENERATED_NAMES = ("__create_fn__", "<lambda>")
_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")

# Frames between a call in the user's line and the operator it names.  `torch.stack(rows)`, `F.pad(x)`
# and `x @ y` are the user's own calls, though Python code of torch runs before the operator does.
_PLUMBING = tuple(
    os.path.join("torch", *path.split("/"))
    for path in (
        "_VF.py",
        "_jit_internal.py",
        "_ops.py",
        "_tensor.py",
        "functional.py",
        "nn/functional.py",
        "overrides.py",
        "utils/_contextlib.py",
        "utils/_device.py",
        "utils/_python_dispatch.py",
        "utils/_pytree.py",
    )
)

# Frameworks that run the training loop, by a part of their file's path.
_LOOPS = {
    "/transformers/trainer.py": "transformers",
    "/lightning/pytorch/loops/": "lightning",
    "/pytorch_lightning/loops/": "lightning",
}


def framework_around(frame: FrameType | None) -> str | None:
    """Return the framework whose training loop called `frame`; None if the loop is the user's own."""
    while frame is not None:
        path = frame.f_code.co_filename.replace(os.sep, "/")
        for part, framework in _LOOPS.items():
            if part in path:
                return framework
        frame = frame.f_back
    return None


class UserCode:
    """Tells the user's code from library code, for one job in `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self._below_folder = os.path.join(self.folder, "")
        # A script started by a relative path carries that path in its code objects; jobs may change
        # their working directory later (Hydra does).
        self._start_folder = os.getcwd()
        self._library_roots = _library_roots()
        self._folder_in_library = self._in_library(self._below_folder)
        self._kinds: dict[int, tuple[int, CodeType]] = {}
        self._places: dict[tuple[int, int], Place] = {}
        self._vias: dict[tuple[int, int], str] = {}
        self._packages: dict[int, tuple[str, CodeType]] = {}
        self._skip_callers(sys._getframe(1))

    def place(self, frame: FrameType | None) -> tuple[Place | None, str | None]:
        """Return the innermost line of user code at or above `frame`, and the library line it went through.

        The second part is None when the user's line made the call itself; the first is None when no
        user code is on the stack.
        """
        kinds = self._kinds
        via: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            known = kinds.get(id(code))
            kind = known[0] if known is not None else self._judge(code)
            if kind == _USER:
                return self._user_place(code, frame.f_lineno), None if via is None else self._via(via)
            if kind == _LIBRARY and via is None:
                via = frame
            frame = frame.f_back
        return None, None if via is None else self._via(via)

    def is_user(self, code: CodeType) -> bool:
        """Return whether `code` is the user's."""
        known = self._kinds.get(id(code))
        return (known[0] if known is not None else self._judge(code)) == _USER

    def codes(self) -> list[CodeType]:
        """Return the user's code objects that were seen so far."""
        return [code for kind, code in list(self._kinds.values()) if kind == _USER]

    def is_library(self, code: CodeType) -> bool:
        """Return whether `code` is of a library that the user calls by name, not plumbing or Flatout."""
        known = self._kinds.get(id(code))
        return (known[0] if known is not None else self._judge(code)) == _LIBRARY

    def package(self, code: CodeType) -> str:
        """Return the folders of a library's file, from its package on: `tqdm`, `torch/utils/tensorboard`."""
        known = self._packages.get(id(code))
        if known is None:
            path = self._shortened(self.absolute(code.co_filename))
            known = self._packages[id(code)] = (path.rpartition("/")[0] or path.removesuffix(".py"), code)
        return known[0]

    def place_in(self, code: CodeType, *, line: int | None = None) -> Place:
        """Return a line of `code` as a Place; its first line by default."""
        return self._user_place(code, code.co_firstlineno if line is None else line)

    def place_at(self, path: str, *, line: int, function: str | None = None) -> Place:
        """Return a line of the file at `path` as a Place."""
        return Place(file=self._shown(self.absolute(path)), line=line, function=function)

    def is_user_file(self, path: str) -> bool:
        """Return whether code in the file at `path` would be the user's."""
        return self._judge_file(path) == _USER

    def loops_around(self, place: Place) -> tuple[int, ...]:
        """Return the first lines of the loops around a line, outer loops first."""
        spans = loop_spans(self.path(place.file))
        return tuple(first for first, last in spans if first <= place.line <= last)

    def named(self, names: tuple[str, ...]) -> Place | None:
        """Return the first line of the user's files that uses one of these names, or None."""
        for path in dict.fromkeys(self.absolute(code.co_filename) for code in self.codes()):
            line = line_naming(path, names)
            if line is not None:
                return self.place_at(path, line=line)
        return None

    def path(self, file: str) -> str:
        """Return the absolute path of a Place's file."""
        return os.path.join(self.folder, file)

    def sources(self, places: Iterable[Place | None], *, context: int = 4) -> dict[str, dict[str, str]]:
        """Return the readable source around `places`: file, then line number, then text."""
        excerpts: dict[str, dict[str, str]] = {}
        for place in places:
            if place is None:
                continue
            lines = linecache.getlines(self.path(place.file))
            first, last = max(1, place.line - context), min(len(lines), place.line + context)
            for number in range(first, last + 1):
                excerpts.setdefault(place.file, {})[str(number)] = lines[number - 1].rstrip("\r\n")
        return {
            file: {number: numbered[number] for number in sorted(numbered, key=int)}
            for file, numbered in excerpts.items()
        }

    def absolute(self, file: str) -> str:
        """Return the real path of a code object's file name."""
        return file if file == _TEXT else os.path.realpath(os.path.join(self._start_folder, file))

    def _skip_callers(self, frame: FrameType | None) -> None:
        """Skip the code that started this process: `python -c`, or a worker's first line."""
        while frame is not None:
            if frame.f_code.co_filename == _TEXT:
                self._kinds[id(frame.f_code)] = (_SKIPPED, frame.f_code)
            frame = frame.f_back

    def _judge(self, code: CodeType) -> int:
        if code.co_filename == _TEXT:
            kind = _SKIPPED if code.co_qualname.startswith(_GENERATED_NAMES) else _USER
        else:
            kind = self._judge_file(code.co_filename)
        self._kinds[id(code)] = (kind, code)
        return kind

    def _judge_file(self, file: str) -> int:
        if file.startswith("<"):  # generated code: dataclasses, torch.fx, frozen modules
            return _SKIPPED
        path = self.absolute(file)
        if path.startswith(_PACKAGE_ROOT) or (path.endswith(_PLUMBING) and self._in_library(path)):
            return _SKIPPED
        if self._folder_in_library and path.startswith(self._below_folder):
            return _USER  # the job itself is an installed package
        return _LIBRARY if self._in_library(path) else _USER

    def _in_library(self, path: str) -> bool:
        if path.startswith(self._library_roots):
            return True
        return any(
            part in _PACKAGE_FOLDERS or part.startswith("torchinductor_") for part in path.split(os.sep)[:-1]
        )

    def _user_place(self, code: CodeType, line: int) -> Place:
        key = (id(code), line)
        place = self._places.get(key)
        if place is None:
            self._judge(code)  # this also keeps the id from being reused
            file = self._shown(self.absolute(code.co_filename))
            place = self._places[key] = Place(file=file, line=line, function=_function_name(code))
        return place

    def _shown(self, path: str) -> str:
        below = path.startswith(self._below_folder)
        return path[len(self._below_folder) :] if below else path

    def _via(self, frame: FrameType) -> str:
        code, line = frame.f_code, frame.f_lineno
        key = (id(code), line)
        via = self._vias.get(key)
        if via is None:
            via = self._vias[key] = f"{self._shortened(self.absolute(code.co_filename))}:{line}"
        return via

    def _shortened(self, path: str) -> str:
        """Return the part of a library path from the package on: torch/nn/modules/linear.py."""
        parts = path.split(os.sep)
        for position in range(len(parts) - 2, -1, -1):
            if parts[position] in _PACKAGE_FOLDERS:
                return "/".join(parts[position + 1 :])
        for root in self._library_roots:
            if path.startswith(root):
                return path[len(root) :].replace(os.sep, "/")
        return "/".join(parts[-2:])


@functools.lru_cache(maxsize=256)
def loop_spans(path: str) -> tuple[tuple[int, int], ...]:
    """Return (first line, last line) of every loop of a source file, outer loops first."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    loops = (node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.AsyncFor, ast.While)))
    return tuple(sorted((node.lineno, node.end_lineno or node.lineno) for node in loops))


@functools.lru_cache(maxsize=256)
def line_naming(path: str, names: tuple[str, ...]) -> int | None:
    """Return the first line of a source file that uses one of these names, also as an argument."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    found = (
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id in names)
        or (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.keyword) and node.arg in names)
    )
    return min(found, default=None)


def _library_roots() -> tuple[str, ...]:
    """Return the folders of installed code, longest first, each ending in a separator."""
    paths = sysconfig.get_paths()
    roots = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots.add(os.path.dirname(os.__file__))
    roots.add(
        os.path.join(sys.base_prefix, sys.platlibdir, f"python{sys.version_info[0]}.{sys.version_info[1]}")
    )
    roots.add(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    resolved = {os.path.join(os.path.realpath(root), "") for root in roots if root}
    return tuple(sorted(resolved, key=len, reverse=True))


def _function_name(code: CodeType) -> str | None:
    """Return `Model.forward`; a comprehension counts as its enclosing function, module level as None."""
    parts = code.co_qualname.split(".")
    while parts and parts[-1] in (*_COMPREHENSIONS, "<locals>", "<module>"):
        parts.pop()
    return ".".join(part for part in parts if part != "<locals>") or None
