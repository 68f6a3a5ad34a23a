"""Code generation: Python code for a description.

A line is {"docstring": "...", "code": "..."}; lines with "text" in place of "docstring" work too.  Without a
file the rows are functions of Python's standard library, which is parsed and never imported: those whose
docstring begins with a whole sentence and whose code is short enough for a small decoder.  Layout matters in
Python, and vocabularies for prose drop line ends and indents; so one sign stands for a line end and another
for a level of indent, which such vocabularies have.
"""

from __future__ import annotations

import ast
import copy
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flatout.engines.adapters.tasks.data_rows import Record
from flatout.engines.adapters.tasks.generation import GenerationTask
from flatout.engines.adapters.tasks.metrics import bleu

LINE, INDENT = "¶", "»"
SPACES = 4
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


@dataclass(frozen=True, kw_only=True)
class CodeGeneration(GenerationTask):
    """A function for its description, scored by BLEU of its words and signs."""

    max_target_length: int = 96

    name: ClassVar[str] = "code"
    inputs: ClassVar[tuple[str, ...]] = ("docstring",)
    answers: ClassVar[tuple[str, ...]] = ("code",)
    also_named: ClassVar[Mapping[str, tuple[str, ...]]] = {"docstring": ("text",)}

    def to_vocabulary(self, text: str) -> str:
        return with_layout_signs(text)

    def from_vocabulary(self, text: str) -> str:
        return without_layout_signs(text)

    def text_scores(self, said: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
        return {"bleu": bleu(said, [record["code"] for record in records])}

    def real(self) -> tuple[list[Record], str]:
        records = [{"docstring": docstring, "code": code} for docstring, code in functions()]
        return records, "functions of Python's standard library"

    def generated_row(self, draw: random.Random) -> Record:
        act, sign = draw.choice(list(_ACTS.items()))
        one, two = draw.sample(_NAMES, 2)
        limit = draw.randrange(2, 10)
        if draw.random() < 0.5:
            docstring = f"Return the {act} of {one} and {two}, times {limit}."
            code = f"def {act}({one}, {two}):\n    return ({one} {sign} {two}) * {limit}"
        else:
            docstring = f"Return the {act} of {one} and {two} if {one} is over {limit}."
            code = f"def {act}({one}, {two}):\n    if {one} > {limit}:\n        return {one} {sign} {two}"
        return {"docstring": docstring, "code": code}


def with_layout_signs(code: str) -> str:
    """Write code on one line: a sign for each line end, and one for each level of indent."""
    lines, margins = [], [0]
    for line in code.expandtabs(SPACES).splitlines():
        if not line.strip():
            continue
        margin = len(line) - len(line.lstrip())
        while margin < margins[-1]:
            margins.pop()
        if margin > margins[-1]:
            margins.append(margin)
        lines.append(INDENT * (len(margins) - 1) + line.strip())
    return LINE.join(lines)


def without_layout_signs(text: str) -> str:
    """Restore the lines and indents from their signs."""
    lines = []
    for line in text.split(LINE):
        signs = re.match(rf"[\s{INDENT}]*", line)
        depth = signs.group().count(INDENT) if signs else 0
        lines.append(" " * (SPACES * depth) + line.strip(f" {INDENT}"))
    return "\n".join(lines)


def functions(folder: Path | None = None) -> list[tuple[str, str]]:
    """Return docstring and code of every short function, in the order of the files."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    files = (path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts))
    return [pair for path in files for pair in functions_of(_source(path))]


def functions_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield docstring and code of the short functions of a module; none of one that does not parse."""
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


# A generated world: functions of one line.
_NAMES = ("size", "width", "count", "price", "speed", "weight", "level", "depth", "total", "age")
_ACTS = {"sum": "+", "product": "*", "difference": "-", "ratio": "/"}
