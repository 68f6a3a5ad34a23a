"""Import and call the user's code: what it raises becomes one line with file and line.

A model's module, its build function, a batch maker, a reward or a task are run by Flatout but written by
someone else.  Their errors are shown as theirs: type, message, file and line, and a way on where the cause is
known.

Other packages extend Flatout by entry points, without editing it:

    [project.entry-points."flatout.adapter_tasks"]
    shout = "my_package.shout"
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from flatout.ground.errors import BadInput, FlatoutError, MissingExtra

OPTIONAL = ("transformers", "peft", "lightning", "pytorch_lightning", "accelerate", "bitsandbytes")
NEEDS_GPU = ("not compiled with CUDA", "NVIDIA driver", "No CUDA GPUs", "CUDA driver", "no CUDA-capable")
_OURS = Path(__file__).parents[1]


def import_user_module(dotted: str, *, hint: str) -> ModuleType:
    """Import a user's module as `python -m` finds it; `hint` says what to do if there is none."""
    make_importable(os.getcwd())
    with calling(f"importing {dotted}"):
        try:
            return importlib.import_module(dotted)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{dotted}.".startswith(f"{error.name}."):
                raise  # the module is there, and what it imports is not
            raise BadInput(f"there is no module {error.name!r}", hint=hint) from None


def import_named(
    name: str, *, what: str, form: str = "write it as package.module:name", where: str | None = None
) -> Any:
    """Import what the user names as package.module:attribute, or file.py:attribute.

    `what` says what it is, the rest are hints.  A file is imported by its name, so that other processes of
    the run find it too.
    """
    place, _, path = name.rpartition(":")
    if not place or not path:
        raise BadInput(f"{name!r} does not name a {what}", hint=form)
    if place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            raise BadInput(f"there is no file {place} for the {what} {name!r}", hint="check the path")
        make_importable(str(file.parent.resolve()))
        return attribute_of(import_user_module(file.stem, hint=form), path, place=place)
    where = where or f"run where the {what}'s file lies, or put its folder on PYTHONPATH"
    return attribute_of(import_user_module(place, hint=where), path, place=place)


def attribute_of(module: ModuleType, path: str, *, place: str) -> Any:
    """Return what a module has at a dotted path; `place` is what the user calls the module."""
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            public = [key for key in dir(found) if not key.startswith("_")]
            near = difflib.get_close_matches(part, public, n=1)
            raise BadInput(
                f"{place} has no {path!r}", hint=f"did you mean {place}:{near[0]}" if near else None
            )
        found = getattr(found, part)
    return found


def import_file(path: Path, *, name: str) -> ModuleType:
    """Import a file of the user's as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks up the names in its annotations
    with calling(f"importing {path.name}"):
        spec.loader.exec_module(module)
    return module


def make_importable(folder: str) -> None:
    """Let modules in a folder be imported by their names, here and in processes that this one spawns."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def load_plugins(group: str) -> dict[str, Any]:
    """Load the objects of one group by the names of their entry points."""
    found: dict[str, Any] = {}
    for each in sorted(entry_points(group=group), key=lambda entry: entry.name):
        try:
            found[each.name] = each.load()
        except Exception as error:
            package = "a package" if each.dist is None else each.dist.name
            raise BadInput(
                f"{package} adds {each.name!r} to {group}, and {each.value} cannot be loaded: {error}",
                hint=f"fix or uninstall {package}",
            ) from error
    return found


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Turn whatever the user's code raises inside into a `FlatoutError` that names `what`."""
    try:
        with _exits_raised():
            yield
    except FlatoutError:
        raise
    except SystemExit as error:
        raise BadInput(f"{what} ended the program: {error}", hint=f"at {place_of(error)}") from error
    except Exception as error:
        raise _describe_error(error, what=what) from error


@contextmanager
def _exits_raised() -> Iterator[None]:
    """Let `os._exit` raise SystemExit: it would end the run without a word, and with the code of a success.

    It stays as it is in processes that the user's code forks, and in other threads.
    """
    end_process, here = os._exit, (os.getpid(), threading.get_ident())

    def end(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) == here:
            raise SystemExit(f"os._exit({status})")
        end_process(status)

    os._exit = end
    try:
        yield
    finally:
        os._exit = end_process


def _describe_error(error: Exception, *, what: str) -> FlatoutError:
    """Make the error that says what the user's code raised, and where."""
    last_line = traceback.format_exception_only(error)[-1].strip()
    place = place_of(error)
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.split(".")[0]
        if package in OPTIONAL:
            return MissingExtra(
                f"{what} needs the package {package!r}, which is not installed", hint=f"pip install {package}"
            )
    if any(words in str(error) for words in NEEDS_GPU):
        return BadInput(
            f"{what} needs a GPU: {last_line}",
            hint=f"create everything on the CPU, Flatout moves it; at {place}",
        )
    return BadInput(f"{what} raised {last_line}", hint=f"at {place}")


def defined_at(function: object) -> str | None:
    """Return file:line of a function of the user's; None if Python does not say."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def place_of(error: BaseException) -> str:
    """Return file:line of the deepest frame outside Python, installed packages and Flatout."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platlib", "purelib")]
    own = [
        frame
        for frame in frames
        if not Path(frame.filename).is_relative_to(_OURS)
        and not frame.filename.startswith("<")  # what the import system and dataclasses make
        and not any(Path(frame.filename).is_relative_to(folder) for folder in libraries)
    ]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
