"""A patch: how to rewrite a user's file so that it does the same work faster.

A module of `transforms` holds one `PATCH`, named like its file.  It rewrites the text of a file around the
lines of a finding, or refuses with a reason.  It must check that names are not rebound and that nothing else
reads what it removes.  The trial shows what it cannot check, shapes for instance: a patched file runs as an
arm of its own, and is kept by the rules of treatments.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.doctor.finding import Finding, FixSafety
from flatout.tuner.patches.source import Refused, SourceFile

if TYPE_CHECKING:
    from flatout.tuner.treatment import Dose

ANYWHERE: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Patch:
    """One way to rewrite a file."""

    rewrite: Callable[[SourceFile, Sequence[int]], str]  # (file, lines; no lines: anywhere); raises Refused
    summary: str  # what it does, as a sentence without its full stop
    _: KW_ONLY
    safety: FixSafety
    answers: tuple[str, ...] = ()  # codes of the rules whose findings it fixes; none: it searches by itself

    @property
    def name(self) -> str:
        return self.rewrite.__module__.rpartition(".")[2].replace("_", "-")


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchSite:
    """A patch and its target: a file, and the lines that findings name."""

    patch: str
    file: str
    lines: tuple[int, ...] = ANYWHERE

    def __str__(self) -> str:
        return ":".join([self.file, *([",".join(map(str, self.lines))] if self.lines else [])])


@functools.cache
def all_patches() -> dict[str, Patch]:
    """Return every patch by name, in the order to try them: those that replace a loop first."""
    package = importlib.import_module("flatout.tuner.patches.transforms")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = {name: importlib.import_module(f"{package.__name__}.{name}").PATCH for name in names}
    order = {"one_gather": 0, "rows_at_once": 1, "one_tensor": 2, "one_forward": 3, "unbound_rows": 4}
    return {
        found[name].name: found[name] for name in sorted(names, key=lambda each: (order.get(each, 9), each))
    }


def read_site(patch: str, value: str) -> PatchSite:
    """Read FILE or FILE:LINE,LINE."""
    file, colon, lines = value.rpartition(":")
    if colon and lines.replace(",", "").isdigit():
        return PatchSite(patch=patch, file=file, lines=tuple(int(each) for each in lines.split(",")))
    return PatchSite(patch=patch, file=value)


def find_sites(
    files: Iterable[str], findings: Iterable[Finding], *, folder: Path, only: Iterable[str] = ()
) -> tuple[list[PatchSite], list[tuple[PatchSite, str]]]:
    """Return (sites that a patch can rewrite, sites that it refuses with the reason)."""
    places: dict[tuple[str, str], set[int]] = {}
    for finding in findings:
        sights = [(finding.code, finding.place), *((sight.code, sight.place) for sight in finding.also)]
        for code, place in sights:
            if place is not None:
                places.setdefault((code, place.file), set()).add(place.line)
    texts = {name: read_text(folder / name) for name in {*files, *(file for _, file in places)}}
    wanted = set(only)
    can: list[PatchSite] = []
    cannot: list[tuple[PatchSite, str]] = []
    for patch in all_patches().values():
        if wanted and patch.name not in wanted:
            continue
        for file, text in sorted(texts.items()):
            lines = {line for code in patch.answers for line in places.get((code, file), ())}
            site = PatchSite(patch=patch.name, file=file, lines=tuple(sorted(lines)))
            if text is None or (patch.answers and not lines and not wanted):
                continue
            try:
                rewrite_file(text, [site])
            except Refused as refusal:
                if lines:
                    cannot.append((site, str(refusal)))
            else:
                can.append(site)
    return can, cannot


def read_text(path: Path) -> str | None:
    """Read a user's file; None if it is missing or is not text."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def rewrite_file(text: str, sites: Sequence[PatchSite]) -> str:
    """Return one file's text under several patches, each at its line numbers in the original file."""
    return _rewritten(text, tuple(sites))


@functools.lru_cache(maxsize=256)
def _rewritten(text: str, sites: tuple[PatchSite, ...]) -> str:
    now = text
    for site in sites:
        lines = moved_lines(text, now, site.lines)
        if site.lines and not lines:
            raise Refused("another patch has replaced these lines")
        new = all_patches()[site.patch].rewrite(SourceFile(now), lines)
        if new == now:
            raise Refused("there is nothing to rewrite")
        compile(new, site.file, "exec", dont_inherit=True)  # a text that is not Python is our own bug
        now = new
    return now


def moved_lines(before: str, after: str, lines: Iterable[int]) -> tuple[int, ...]:
    """Return where lines are after a change, without those it replaced."""
    if before == after:
        return tuple(lines)
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    shifts = {
        block.a + offset + 1: block.b + offset + 1
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }
    return tuple(shifts[line] for line in lines if line in shifts)


def patched_texts(sites: Sequence[PatchSite], *, folder: Path) -> dict[str, tuple[str, str]]:
    """Map each file to (its text, its text under the patches)."""
    by_file: dict[str, list[PatchSite]] = {}
    for site in sites:
        by_file.setdefault(site.file, []).append(site)
    found = {}
    for file, own in by_file.items():
        text = read_text(folder / file)
        if text is None:
            raise Refused(f"{file} cannot be read")
        found[file] = text, rewrite_file(text, own)
    return found


def sites_of(doses: Iterable[Dose]) -> list[PatchSite]:
    """Return the patches among treatments."""
    return [read_site(dose.name, str(dose.value)) for dose in doses if dose.name in all_patches()]


def write_texts(doses: Iterable[Dose], folder: Path) -> dict[str, str]:
    """Write the patched files of a trial into its folder; map each file to its patched text's path."""
    found = {}
    for number, (file, (_, text)) in enumerate(patched_texts(sites_of(doses), folder=Path.cwd()).items()):
        path = folder / f"patched-{number}.py"
        path.write_bytes(text.encode("utf-8"))
        found[os.path.abspath(file)] = str(path)
    return found


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
