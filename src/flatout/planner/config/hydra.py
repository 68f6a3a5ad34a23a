"""Hydra's `defaults` list: which files a config is made of, in which order, and where each is put.

The last file that defines a value wins.  A file's own values come last unless `_self_` says otherwise.  A
file of the group `data` is put under `data.`, unless its header (`# @package _global_`) or the entry
(`data@train: imagenet`) names another package.  `override /data: imagenet`, in whatever file, chooses another
file for a group; of two such choices the outer file's counts, then the later one's, and what the job's
command line chooses counts before all.  Entries that only Hydra can resolve (its own groups, choices
made by interpolation, configs registered in Python) are left out with a note.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flatout.errors import BadInput
from flatout.planner.config.documents import Document, Value, read_document

MAX_DEPTH = 20
_HEADER = re.compile(r"^#\s*@package\s+(\S+)\s*$", flags=re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One file of a config, and the package (dotted prefix) its values are put under."""

    path: Path
    document: Document
    package: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    group: str | None  # None for a plain config name
    options: tuple[str | None, ...]
    package: str | None
    optional: bool = False
    override: bool = False


def is_hydra(document: Document) -> bool:
    return document.sections.get("defaults") == "list"


def package_header(document: Document) -> str | None:
    """The package of `# @package name`; "" for _global_."""
    match = _HEADER.search(document.text)
    if match is None or match[1] == "_group_":
        return None
    return "" if match[1] == "_global_" else match[1].removeprefix("_global_.")


def chosen_groups(given: Mapping[str, Value], *, root: Path) -> dict[str, str | None]:
    """The keys of `given` that name a group: what is given for one chooses a file of it."""
    found = {}
    for key, value in given.items():
        folder = root / key.removeprefix("+").partition("@")[0]
        if not folder.is_dir():
            continue
        if value is not None and _existing(folder / str(value)) is None:
            names = ", ".join(sorted(path.stem for path in folder.iterdir() if path.is_file()))
            raise BadInput(
                f"--set {key}={value}: the group {folder.name} has no {value}.yaml", hint=f"it has {names}"
            )
        found[key] = None if value is None else str(value)
    return found


def hydra_layers(
    path: Path, *, root: Path, notes: list[str], choices: Mapping[str, str | None] | None = None
) -> list[Layer]:
    """The files of the config at `path`, in the order in which they are merged.

    `choices` are the options of groups that the job is started with.
    """
    chosen: dict[str, tuple[str | None, ...]] = {
        key.removeprefix("+"): (option,) for key, option in (choices or {}).items()
    }
    document = read_document(path, name=str(path.relative_to(root)))
    listed = {_key(entry, path, root=root) for entry in _entries(document)}
    added = tuple(
        _Entry(group=f"/{group}", options=options, package=package or None)
        for key, options in chosen.items()
        if key not in listed
        for group, _, package in [key.partition("@")]
    )
    _note_overrides(path, root=root, chosen=chosen, added=added, depth=0)
    return list(_layers(path, root=root, package="", chosen=chosen, notes=notes, added=added, depth=0))


def _note_overrides(
    path: Path,
    *,
    root: Path,
    chosen: dict[str, tuple[str | None, ...]],
    added: tuple[_Entry, ...] = (),
    depth: int,
) -> None:
    """Fill `chosen` in the order in which Hydra does: a file's own choices, then those of its later files."""
    if depth > MAX_DEPTH:
        raise BadInput(f"the defaults of {path.name} go in a circle")
    entries = [*_entries(read_document(path, name=str(path.relative_to(root)))), *added]
    for entry in entries:
        if entry.override:
            chosen.setdefault(_key(entry, path, root=root), entry.options)
    for entry in reversed(entries):
        for found, _ in _targets(entry, path, root=root, package="", chosen=chosen, notes=[]):
            _note_overrides(found, root=root, chosen=chosen, depth=depth + 1)


def _layers(
    path: Path,
    *,
    root: Path,
    package: str,
    chosen: dict[str, tuple[str | None, ...]],
    notes: list[str],
    added: tuple[_Entry, ...] = (),
    depth: int,
) -> Iterator[Layer]:
    if depth > MAX_DEPTH:
        raise BadInput(f"the defaults of {path.name} go in a circle")
    document = read_document(path, name=str(path.relative_to(root)))
    header = package_header(document)
    own = Layer(path=path, document=document, package=package if header is None else header)
    placed = False
    for entry in (*_entries(document), *added):
        if entry.group is None and entry.options == ("_self_",):
            yield own
            placed = True
            continue
        for found, inner in _targets(entry, path, root=root, package=own.package, chosen=chosen, notes=notes):
            yield from _layers(found, root=root, package=inner, chosen=chosen, notes=notes, depth=depth + 1)
    if not placed:
        yield own


def _targets(
    entry: _Entry,
    path: Path,
    *,
    root: Path,
    package: str,
    chosen: dict[str, tuple[str | None, ...]],
    notes: list[str],
) -> Iterator[tuple[Path, str]]:
    """The files an entry names and the package of each."""
    if entry.override:
        return
    options = chosen.get(_key(entry, path, root=root), entry.options) if entry.group else entry.options
    for option in options:
        target = PurePosixPath(entry.group or "") / option if option else None
        if target is None or "???" in (option or "") or "${" in str(target):
            if option is not None:
                notes.append(f"defaults of {path.name}: {entry.group}: {option} is chosen at launch")
            continue
        absolute = str(target).startswith("/")
        folder = root if absolute else path.parent
        relative = str(target).lstrip("/")
        if relative.startswith("hydra/"):
            continue
        file = _existing(folder / relative)
        if file is None:
            if not entry.optional:
                notes.append(
                    f"defaults of {path.name}: there is no {relative}.yaml, so its values are unknown"
                )
            continue
        yield file, _package(entry, relative, package=package, absolute=absolute)


def _existing(stem: Path) -> Path | None:
    candidates = (stem, stem.with_name(f"{stem.name}.yaml"), stem.with_name(f"{stem.name}.yml"))
    return next((path for path in candidates if path.is_file()), None)


def _package(entry: _Entry, relative: str, *, package: str, absolute: bool) -> str:
    base = "" if absolute else package
    if entry.package is None:
        inner = ".".join(PurePosixPath(relative).parent.parts)
    elif entry.package.startswith("_global_"):
        base, inner = "", entry.package.removeprefix("_global_").lstrip(".")
    else:
        base, inner = package, "" if entry.package == "_here_" else entry.package
    return ".".join(part for part in (base, inner) if part)


def _key(entry: _Entry, path: Path, *, root: Path) -> str:
    """A group as seen from the root, with the package that tells two entries of one group apart."""
    group = entry.group or ""
    base = "" if group.startswith("/") else os.path.relpath(path.parent, root)
    return str(PurePosixPath(base) / group.lstrip("/")) + (f"@{entry.package}" if entry.package else "")


def _entries(document: Document) -> list[_Entry]:
    """The defaults list, from keys such as `defaults.0`, `defaults.1.data` and `defaults.2.callbacks.0`."""
    found: dict[int, _Entry] = {}
    for key, scalar in document.scalars.items():
        parts = key.split(".", 2)
        if parts[0] != "defaults" or len(parts) < 2 or not parts[1].isdigit():
            continue
        number = int(parts[1])
        # As written: 01_stage and 01 are names here, not numbers.
        written = document.text[scalar.start : scalar.end] if scalar.quotes == "plain" else str(scalar.value)
        option = None if scalar.value is None else written
        if len(parts) == 2:
            name, _, package = (option or "").partition("@")
            found[number] = _Entry(group=None, options=(name,), package=package or None)
            continue
        words = re.sub(r"\.\d+$", "", parts[2]).split()
        group, _, package = words[-1].partition("@")
        earlier = found[number].options if number in found else ()
        found[number] = _Entry(
            group=group,
            options=(*earlier, option),
            package=package or None,
            optional="optional" in words[:-1],
            override="override" in words[:-1],
        )
    return [found[number] for number in sorted(found)]
