"""Pages that the source owns: rules, Evidence, the datasheet, flags, the Python API and the map of the house.

MkDocs calls `on_files` once per build; each page is made from the code it documents and never lies on
disk, so it cannot disagree with it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import flatout
from flatout.cli.app import all_verbs
from flatout.doctor import rules_page
from flatout.ground.units import UNKNOWN
from flatout.hardware import datasheet
from flatout.hardware.matching import all_datasheets
from flatout.measure import evidence


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those on disk."""
    pages: dict[str, Callable[[], str]] = {
        "rules.md": rules_page.markdown,
        "evidence.md": evidence_page,
        "devices.md": devices_page,
        "flags.md": flags_page,
        "house.md": house_page,
        "python.md": python_page,
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content()))
    return files


def evidence_page() -> str:
    """Every dataclass of the Evidence document, its root first."""
    classes = [value for value in vars(evidence).values() if inspect.isclass(value)]
    shapes = [value for value in classes if value.__module__ == evidence.__name__]
    shapes.sort(key=lambda shape: shape is not evidence.Evidence)
    lines = ["# Evidence", "", docstring(evidence), ""]
    lines += [f"The version written by this release is {evidence.EVIDENCE_VERSION}.", ""]
    for shape in shapes:
        lines += [f"## {shape.__name__}", "", docstring(shape), "", *field_table(shape), ""]
    return "\n".join(lines)


def devices_page() -> str:
    """The datasheet table, and how to read it."""
    heads = ["GPU", "memory GiB", "bandwidth GB/s", "capability", "SMs", *datasheet.DTYPES]
    lines = [
        "# Devices",
        "",
        "`flatout devices` shows the GPUs of this machine and what of the host a job may use.",
        'A GPU that is not here is shown by its name, `flatout devices "RTX 4090"`, or by its memory alone,',
        "`flatout devices 24GB`; `--json` prints one document.",
        "",
        "## Datasheets",
        "",
        docstring(datasheet),
        "",
        "SMs are multiprocessors; peaks are in TFLOP/s, for int8 in TOP/s.",
        "",
        table_row(heads),
        table_row(["---"] * len(heads)),
    ]
    for row in all_datasheets():
        peaks = [row.peak_flops.get(dtype) for dtype in datasheet.DTYPES]
        facts = [
            row.name,
            f"{row.memory_bytes / 2**30:.1f}",
            f"{row.bandwidth_bytes_per_s / 1e9:.0f}",
            row.compute_capability or UNKNOWN,
            str(row.multiprocessors or UNKNOWN),
        ]
        lines.append(table_row([*facts, *(f"{peak / 1e12:.4g}" if peak else "" for peak in peaks)]))
    lines += ["", "## Sources", ""]
    lines += [f"- {row.name}: {row.source}" for row in all_datasheets()]
    return "\n".join(lines)


def flags_page() -> str:
    """Every flag of every verb: those that several share first."""
    uses: dict[tuple[str, str], list[str]] = {}
    verbs = dict(all_verbs())
    for verb, command in verbs.items():
        for option in command.params:
            names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            if option.help and names.startswith("`-"):
                uses.setdefault((names, option.help), []).append(verb)
    lines = ["# Flags", "", "Flags of Flatout go before a script, and after a verb.", "", "## Shared", ""]
    lines += [table_row(["flag", "meaning", "verbs"]), table_row(["---"] * 3)]
    for (names, meaning), users in sorted(uses.items()):
        if len(users) > 1:
            lines.append(table_row([names, meaning, ", ".join(users)]))
    lines += ["", "`-h`, `--help` and `--version` work for every verb.", ""]
    for verb in verbs:
        own = [key for key, users in uses.items() if users == [verb]]
        if own:
            lines += [f"## {verb}", "", table_row(["flag", "meaning"]), table_row(["---"] * 2)]
            lines += [*(table_row(key) for key in own), ""]
    return "\n".join(lines)


def house_page() -> str:
    """What each package of Flatout holds, as its `__init__` says."""
    lines = [
        "# The house",
        "",
        "What each room holds, from the command line down. Each opens with this map.",
        "",
    ]
    root = Path(flatout.__file__).parent
    for file in sorted(root.rglob("__init__.py"))[1:]:
        said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        if said:
            name = file.parent.relative_to(root).as_posix()
            lines += [f"## {name}", "", "```text", said, "```", ""]
    return "\n".join(lines)


def python_page() -> str:
    """The public names of `flatout`: functions with their signatures, dataclasses with their fields."""
    lines = ["# Python API", "", docstring(flatout), ""]
    for name in dir(flatout):
        if name.startswith("_"):
            continue
        value = getattr(flatout, name)
        lines += [f"## {name}", ""]
        if inspect.isfunction(value):
            lines += ["```python", signature(value), "```", ""]
        lines += [docstring(value), ""]
        if dataclasses.is_dataclass(value):
            lines += [*field_table(value), ""]
    return "\n".join(lines)


def field_table(shape: Any) -> list[str]:
    """The fields of a dataclass, each with the comment beside it."""
    comments = trailing_comments(sys.modules[shape.__module__])
    lines = [table_row(["field", "type", "meaning"]), table_row(["---"] * 3)]
    for field in dataclasses.fields(shape):
        type_name = str(field.type).replace("|", "\\|")
        meaning = comments.get((shape.__name__, field.name), "")
        lines.append(table_row([f"`{field.name}`", f"`{type_name}`", meaning]))
    return lines


@functools.cache
def trailing_comments(module: ModuleType) -> dict[tuple[str, str], str]:
    """(class, field) -> the comment beside the field."""
    source = inspect.getsource(module)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    by_line = {token.start[0]: token.string.lstrip("# ") for token in comments}
    return {
        (owner.name, field.target.id): by_line[field.lineno]
        for owner in ast.parse(source).body
        if isinstance(owner, ast.ClassDef)
        for field in owner.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.lineno in by_line
    }


def signature(function: Callable[..., Any]) -> str:
    """The head of a function as its source has it: `inspect` would show annotations in quotes."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef) and node.returns is not None
    return f"def {node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"


def table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def docstring(thing: object) -> str:
    text = inspect.getdoc(thing)
    assert text, f"{thing!r} has no docstring"
    return text
