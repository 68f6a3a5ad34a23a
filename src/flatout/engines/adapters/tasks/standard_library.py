"""Docstring and code of Python's own standard library: a few thousand real functions on every machine.

Modules are parsed, never imported.  A function counts if its docstring opens with a whole sentence and its
code, without the docstring, is short enough to be written by a small decoder.
"""

from __future__ import annotations

import ast
import copy
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Tests and demonstrations repeat themselves; what is installed beside the library is not part of it.
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
MIN_WORDS, MAX_WORDS = 3, 60
MAX_CODE_CHARACTERS = 480


def functions(folder: Path | None = None) -> list[tuple[str, str]]:
    """Docstring and code of every short function, in the order of the files; the library's by default."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    files = (path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts))
    return [pair for path in files for pair in functions_of(_source(path))]


def functions_of(source: str) -> Iterator[tuple[str, str]]:
    """Docstring and code of the short functions of one module; nothing of one that does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in old modules
        try:
            module = ast.parse(source)
        except (SyntaxError, ValueError):
            return
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and (pair := _pair(node)):
            yield pair


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _pair(node: ast.FunctionDef) -> tuple[str, str] | None:
    documented = ast.get_docstring(node)
    if not documented or len(node.body) < 2:
        return None
    docstring = " ".join(documented.split("\n\n")[0].split())
    if not MIN_WORDS <= len(docstring.split()) <= MAX_WORDS:
        return None
    bare = copy.copy(node)
    bare.body, bare.decorator_list, bare.returns = node.body[1:], [], None
    code = ast.unparse(bare)
    return (docstring, code) if len(code) <= MAX_CODE_CHARACTERS else None
