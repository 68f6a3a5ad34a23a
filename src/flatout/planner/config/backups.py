"""Write a plan into a config, and undo it.

The diff comes first.  Then a backup: a folder of its own per run, `.flatout/backups/<time>/` beside the
config, with a copy of every file and a manifest of the checksums before and after.  Then all files at once.
`undo` goes back one backup at a time; a file that was changed since is left alone unless forced, and what a
forced undo overwrites is kept in the backup.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flatout.ground.atomic_files import flush
from flatout.ground.codec import encode
from flatout.ground.documents import DocumentKind, read_document, show_diff
from flatout.ground.errors import BadInput
from flatout.planner.config.config_text import Value, check_editable, edit_scalars
from flatout.planner.config.job_config import ConfigPlace, JobConfig
from flatout.planner.config.knobs import LAST_NAMES

BACKUPS = Path(".flatout") / "backups"
MANIFEST, UNDONE = "manifest.json", "undone"
KIND = DocumentKind(
    format="flatout-backup",
    version=1,
    what="the manifest of a backup",
    hint="the copies beside it can be restored by hand",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEdit:
    """One file before and after."""

    path: Path
    before: bytes
    after: bytes
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFile:
    """One file of a backup: its path from the config's folder, its copy, and its checksums."""

    path: str
    copy: str
    sha256_before: str
    sha256_after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The files of a backup, as its manifest lists them."""

    config: str | None = None  # its main file, from the folder that holds the backups
    files: tuple[SavedFile, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Backup(Manifest):
    """A backup that an apply made, to undo it."""

    folder: Path


def plan_edits(config: JobConfig, changes: Mapping[ConfigPlace, Value]) -> tuple[FileEdit, ...]:
    """Return the edits of every file, none of them written."""
    edits = []
    for path in sorted({place.path for place in changes}):
        document = config.documents[path]
        edited = edit_scalars(
            document, {place.key: value for place, value in changes.items() if place.path == path}
        )
        before, after = document.text.encode("utf-8"), edited.text.encode("utf-8")
        if before != after:
            warnings = (*edited.warnings, *_warn_followers(config, changes, path=path))
            edits.append(FileEdit(path=path, before=before, after=after, warnings=warnings))
    return tuple(edits)


def _warn_followers(config: JobConfig, changes: Iterable[ConfigPlace], *, path: Path) -> list[str]:
    """Warn about other keys that take a changed value by interpolation; the knob itself is meant to."""
    meant = (*LAST_NAMES["batch_size"], *LAST_NAMES["accumulation"])
    warnings = []
    for place in sorted(place for place in changes if place.path == path):
        keys = set().union(*(stage.followers(place) for stage in config.stages))
        others = ", ".join(sorted(key for key in keys if key.rpartition(".")[2] not in meant))
        if others:
            warnings.append(f"changing {place.key} ({place}) also changes what takes its value: {others}")
    return warnings


def show_edits(edits: Sequence[FileEdit], *, root: Path) -> str:
    """Show a unified diff of all edits."""
    return show_diff(
        {_relative(edit.path, root): (edit.before.decode(), edit.after.decode()) for edit in edits}
    )


def check_places(config: JobConfig, places: Iterable[ConfigPlace]) -> None:
    """Raise BadInput if a value cannot be replaced: asked before a plan is made, which takes a while."""
    for place in sorted(set(places)):
        check_writable(place.path)
        check_editable(config.documents[place.path], place.key)


def apply_edits(
    edits: Sequence[FileEdit], *, root: Path, config: Path | None = None, now: datetime | None = None
) -> Backup | None:
    """Back up, then write all files; return None if there is nothing to change.

    `config` is the main file of the config that the edits belong to.
    """
    if not edits:
        return None
    for edit in edits:
        check_writable(edit.path)
        if edit.path.read_bytes() != edit.before:
            raise BadInput(
                f"{edit.path} was changed while the plan was made", hint="nothing was written; plan again"
            )
    name = None if config is None else _relative(config, root)
    backup = _save(edits, root=root, config=name, now=now or datetime.now(UTC))
    try:
        write_together({edit.path: edit.after for edit in edits})
    except BaseException:
        shutil.rmtree(backup.folder)  # it would be taken for the last change
        raise
    return backup


def undo(root: Path, *, config: Path | None = None, force: bool = False, what: str = "plan") -> Backup:
    """Restore the files of the last backup, of this config if one is named, byte for byte.

    `what` names what was applied in messages; only a plan can be undone by force.
    """
    backup = last_backup(root, config=None if config is None else _relative(config, root))
    contents: dict[Path, bytes] = {}
    overwritten: dict[str, bytes] = {}
    for saved in backup.files:
        path = root / saved.path
        copy = _read_copy(backup, saved)
        found = path.read_bytes() if path.exists() else None
        if found is not None:
            check_writable(path)
        if found is None or sha256(found) not in (saved.sha256_after, saved.sha256_before):
            if not force:
                state = "is gone" if found is None else "was changed since"
                instead = "--force restores it" if what == "plan" else f"its copy is in {backup.folder}"
                raise BadInput(
                    f"{saved.path} {state} the {what} was applied", hint=f"nothing was restored; {instead}"
                )
            if found is not None:
                overwritten[saved.copy] = found
        contents[path] = copy
    if overwritten:
        folder = _fresh_folder(backup.folder, "overwritten")
        for name, content in overwritten.items():
            write_file(folder / name, content)
    write_together(contents)
    (backup.folder / UNDONE).touch()
    return backup


def last_backup(root: Path, *, config: str | None = None) -> Backup:
    """Find the newest backup that has not been undone; several configs may lie in one folder."""
    folder = root / BACKUPS
    found = sorted(path for path in folder.glob(f"*/{MANIFEST}") if not (path.parent / UNDONE).exists())
    for path in reversed(found):
        saved = read_document(path, Manifest, KIND)
        if config is None or saved.config in (None, config):
            return Backup(folder=path.parent, config=saved.config, files=saved.files)
    of = f" of {config}" if config and found else ""
    raise BadInput(f"nothing to undo: {folder} holds no backup{of}", hint="--apply makes one")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _relative(path: Path, root: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def _save(edits: Sequence[FileEdit], *, root: Path, config: str | None, now: datetime) -> Backup:
    try:
        kept = root / BACKUPS
        kept.mkdir(parents=True, exist_ok=True)
        folder = _fresh_folder(kept, now.strftime("%Y%m%dT%H%M%S.%fZ"))
    except OSError as error:
        raise BadInput(
            f"cannot make a backup in {root / BACKUPS}: {error.strerror}", hint="nothing was written"
        ) from None
    files = tuple(
        SavedFile(
            path=_relative(edit.path, root),
            copy=f"{number:02}_{edit.path.name}",
            sha256_before=sha256(edit.before),
            sha256_after=sha256(edit.after),
        )
        for number, edit in enumerate(edits)
    )
    try:
        for saved, edit in zip(files, edits, strict=True):
            write_file(folder / saved.copy, edit.before)
        manifest = encode(Manifest(config=config, files=files))
        document = {"format": KIND.format, "version": KIND.version, **manifest}
        # Last, because a folder without a manifest is no backup.
        write_file(folder / MANIFEST, json.dumps(document, indent=2).encode("utf-8"))
    except BaseException:
        shutil.rmtree(folder)
        raise
    return Backup(folder=folder, files=files, config=config)


def _fresh_folder(parent: Path, name: str) -> Path:
    """Make a folder that was not there: two runs in one moment must not share it."""
    for number in range(1, 1000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise BadInput(f"{parent} holds too many backups of the same second")


def _read_copy(backup: Backup, saved: SavedFile) -> bytes:
    path = backup.folder / saved.copy
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(
            f"the backup {path} cannot be read: {error.strerror}", hint="nothing was written"
        ) from None
    if sha256(content) != saved.sha256_before:
        raise BadInput(
            f"the backup {path} is damaged: its checksum is not the one on record",
            hint="nothing was written",
        )
    return content


def check_writable(path: Path) -> None:
    """Raise BadInput for a file that must not, or cannot, be replaced."""
    if path.is_symlink():
        raise BadInput(
            f"{path} is a symbolic link to {os.readlink(path)}",
            hint="nothing was written; change the file itself",
        )
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise BadInput(f"{path} is gone", hint="nothing was written") from None
    if not stat.S_ISREG(mode):
        raise BadInput(f"{path} is not a plain file", hint="nothing was written")
    # The superuser may write everything, but a file without any permission to write was meant to stay.
    if not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) or not os.access(path, os.W_OK):
        allow = f"chmod u+w {shlex.quote(str(path))}"
        raise BadInput(f"{path} is read-only", hint=f"nothing was written; allow it with {allow}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise BadInput(f"the folder {path.parent} is read-only", hint="nothing was written")


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Give every file its content; after an error each has the one it had before."""
    before = {path: path.read_bytes() if path.exists() else None for path in contents}
    temporaries: dict[Path, Path] = {}
    try:
        with _explain_errors():
            for path, content in contents.items():
                temporaries[path] = _temporary_beside(path)
                _fill(temporaries[path], content, like=path)
            _rename_all(temporaries, before)
    finally:
        for temporary in temporaries.values():
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()


def write_file(path: Path, content: bytes) -> None:
    """Write one file that is not there yet, flushed to the disk."""
    with _explain_errors(), path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _explain_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = error.filename or "a file beside those to change"  # a write that fails knows no name
        raise BadInput(f"could not write {name}: {error.strerror}", hint="no file was changed") from error


def _temporary_beside(path: Path) -> Path:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    return Path(name)


def _fill(temporary: Path, content: bytes, *, like: Path) -> None:
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if like.exists():
        found = like.stat()
        temporary.chmod(stat.S_IMODE(found.st_mode))
        with contextlib.suppress(PermissionError):  # only the superuser may give files away
            os.chown(temporary, found.st_uid, found.st_gid)
    else:
        temporary.chmod(0o644)


def _rename_all(temporaries: Mapping[Path, Path], before: Mapping[Path, bytes | None]) -> None:
    renamed: list[Path] = []
    try:
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
            renamed.append(path)
        for folder in {path.parent for path in temporaries}:
            flush(folder)
    except BaseException:
        for path in renamed:
            _put_back(path, before[path])
        raise


def _put_back(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
        return
    temporary = _temporary_beside(path)
    _fill(temporary, content, like=path)
    os.replace(temporary, path)
