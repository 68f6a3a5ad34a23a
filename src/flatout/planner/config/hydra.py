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

from flatout.ground.errors import BadInput
from flatout.planner.config.config_text import Document, Layer, Value, package_header, read_document

MAX_DEPTH = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    group: str | None  # None for a plain config name
    options: tuple[str | None, ...]
    package: str | None
    optional: bool = False
    override: bool = False


def chosen_groups(given: Mapping[str, Value], *, root: Path) -> dict[str, str | None]:
    """Return the keys of `given` that name a group, with the file chosen for each."""
    found = {}
    for key, value in given.items():
        folder = root / key.removeprefix("+").partition("@")[0]
        if not folder.is_dir():
            continue
        if value is not None and _find_file(folder / str(value)) is None:
            names = ", ".join(sorted(path.stem for path in folder.iterdir() if path.is_file()))
            raise BadInput(
                f"--set {key}={value}: the group {folder.name} has no {value}.yaml", hint=f"it has {names}"
            )
        found[key] = None if value is None else str(value)
    return found


def hydra_layers(
    path: Path, *, root: Path, notes: list[str], choices: Mapping[str, str | None] | None = None
) -> list[Layer]:
    """Return the files of the config at `path` in merge order.

    `choices` are the options of groups that the job is started with.
    """
    chosen: dict[str, tuple[str | None, ...]] = {
        key.removeprefix("+"): (option,) for key, option in (choices or {}).items()
    }
    walk = _Walk(root=root, chosen=chosen, notes=notes)
    listed = {walk.key(entry, path) for entry in _entries(walk.read(path))}
    added = tuple(
        _Entry(group=f"/{group}", options=options, package=package or None)
        for key, options in chosen.items()
        if key not in listed
        for group, _, package in [key.partition("@")]
    )
    walk.note_overrides(path, added)
    return list(walk.layers(path, added))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Walk:
    """Walks the files that a config's defaults name; `chosen` holds the options chosen elsewhere."""

    root: Path
    chosen: dict[str, tuple[str | None, ...]]
    notes: list[str]

    def read(self, path: Path, depth: int = 0) -> Document:
        if depth > MAX_DEPTH:
            raise BadInput(f"the defaults of {path.name} go in a circle", hint="remove one of them")
        return read_document(path, name=str(path.relative_to(self.root)))

    def note_overrides(self, path: Path, added: tuple[_Entry, ...] = (), *, depth: int = 0) -> None:
        """Fill `chosen` in the order in which Hydra does: a file's own choices, then its later files'."""
        entries = [*_entries(self.read(path, depth)), *added]
        for entry in entries:
            if entry.override:
                self.chosen.setdefault(self.key(entry, path), entry.options)
        for entry in reversed(entries):
            for found, _ in self.targets(entry, path, package="", notes=[]):
                self.note_overrides(found, depth=depth + 1)

    def layers(
        self, path: Path, added: tuple[_Entry, ...] = (), *, package: str = "", depth: int = 0
    ) -> Iterator[Layer]:
        document = self.read(path, depth)
        header = package_header(document)
        own = Layer(path=path, document=document, package=package if header is None else header)
        placed = False
        for entry in (*_entries(document), *added):
            if entry.group is None and entry.options == ("_self_",):
                yield own
                placed = True
                continue
            for found, inner in self.targets(entry, path, package=own.package, notes=self.notes):
                yield from self.layers(found, package=inner, depth=depth + 1)
        if not placed:
            yield own

    def targets(
        self, entry: _Entry, path: Path, *, package: str, notes: list[str]
    ) -> Iterator[tuple[Path, str]]:
        """Yield the files that an entry names, and the package of each."""
        if entry.override:
            return
        options = self.chosen.get(self.key(entry, path), entry.options) if entry.group else entry.options
        for option in options:
            target = PurePosixPath(entry.group or "") / option if option else None
            if target is None or "???" in (option or "") or "${" in str(target):
                if option is not None:
                    notes.append(f"defaults of {path.name}: {entry.group}: {option} is chosen at launch")
                continue
            absolute = str(target).startswith("/")
            relative = str(target).lstrip("/")
            if relative.startswith("hydra/"):
                continue
            file = _find_file((self.root if absolute else path.parent) / relative)
            if file is not None:
                yield file, _package(entry, relative, package=package, absolute=absolute)
            elif not entry.optional:
                notes.append(f"defaults of {path.name}: there is no {relative}.yaml; its values are unknown")

    def key(self, entry: _Entry, path: Path) -> str:
        """Return a group as seen from the root, with the package that tells its entries apart."""
        group = entry.group or ""
        base = "" if group.startswith("/") else os.path.relpath(path.parent, self.root)
        return str(PurePosixPath(base) / group.lstrip("/")) + (f"@{entry.package}" if entry.package else "")


def _find_file(stem: Path) -> Path | None:
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


def _entries(document: Document) -> list[_Entry]:
    """Read the defaults list, from keys such as `defaults.0`, `defaults.1.data`, `defaults.2.callbacks.0`."""
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
