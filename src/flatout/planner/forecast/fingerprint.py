"""What the traces of a job depend on, as one checksum.

A trace is made by code: the user's (the module that builds the job and whatever lies beside it) and that of
the packages it is built from; Flatout's own rules are the matter of `stored`.  It is made from settings, but
not from what a plan varies itself: a batch size does not make another model, or no plan could be made at all.
Files are compared by content.  What cannot be read in a moment has no checksum, and then nothing is stored.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType

import flatout

PACKAGES = ("torch", "transformers", "peft", "lightning", "pytorch-lightning", "bitsandbytes", "accelerate")
SUFFIXES = (".py", ".json", ".toml", ".yaml", ".yml")
MOST_ENTRIES, MOST_BYTES = 20_000, 32 << 20  # of folders that are looked through
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist"})


def fingerprint(
    model: str,
    *,
    settings: Mapping[str, object],
    varied: Collection[str] = (),
    configs: Iterable[Path] = (),
    options: Mapping[str, object] | None = None,
) -> str | None:
    """The checksum of a job that has been loaded; None where it cannot be told.

    `varied` are the keys of `settings` that a plan varies; `configs` are the files that `settings` come from;
    `options` are what else the job was loaded with.
    """
    files = _files(model, left_out={path.resolve() for path in configs})
    if files is None:
        return None
    parts = {
        "model": model,
        "settings": {key: value for key, value in settings.items() if key not in varied},
        "options": dict(options or {}),
        "files": files,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }
    return _checksum(json.dumps(parts, sort_keys=True, default=str).encode())


def _files(model: str, *, left_out: Collection[Path]) -> dict[str, str] | None:
    """Path -> checksum of every file that the job may be made from; None: too many to look at."""
    found: dict[str, str] = {}
    num_bytes = num_entries = 0
    for folder in sorted(_folders(model)):
        for parent, folders, names in os.walk(folder):
            folders[:] = sorted(name for name in folders if name not in SKIPPED and name[0] != ".")
            num_entries += len(folders) + len(names)
            if num_entries > MOST_ENTRIES:
                return None
            for path in (Path(parent, name) for name in sorted(names) if name.endswith(SUFFIXES)):
                if str(path) in found or path in left_out or not path.is_file():
                    continue
                num_bytes += path.stat().st_size
                if num_bytes > MOST_BYTES:
                    return None
                found[str(path)] = _checksum(path.read_bytes())
    return found


def _folders(model: str) -> set[Path]:
    """A config folder, and the folder of every module that is neither Python's, a package's, nor ours."""
    place = Path(model)
    named = {place if place.is_dir() else place.parent} if place.exists() else set()
    libraries = [Path(path).resolve() for path in sysconfig.get_paths().values()]
    libraries += [Path(sys.prefix).resolve(), Path(flatout.__file__).resolve().parent]
    for module in loaded_modules():
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        # torch.ops calls itself "_ops.py": a module without a file is no reason to look at where we are.
        if path.is_file() and not any(path.is_relative_to(folder) for folder in libraries):
            named.add(path.parent)
    return {folder.resolve() for folder in named}


def loaded_modules() -> list[ModuleType]:
    return list(sys.modules.values())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
