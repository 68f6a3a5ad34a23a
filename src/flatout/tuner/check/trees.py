"""The source of a git revision beside the working tree, with the same data.

The revision's files are written to a temporary folder, with a separate index: the repository, its index and
its working tree stay unchanged.  Files that git does not track (data, downloaded weights) are linked there,
because the old source needs them too.  A job of that tree runs in the corresponding folder, and folders of
Python's path that lie in the repository are replaced by those of the tree, so that it imports its own modules
and not the working tree's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.ground.errors import BadInput

LEFT_OUT = ("__pycache__", ".git")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """A source: the folder its job runs in, and folders that go before Python's path."""

    name: str
    folder: Path
    command: tuple[str, ...]
    paths: tuple[str, ...] = ()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter its folder, with its path, so that processes started meanwhile belong to it."""
        before = os.environ.get("PYTHONPATH")
        whole = [*self.paths, *([before] if before else [])]
        with contextlib.chdir(self.folder):
            if self.paths:
                os.environ["PYTHONPATH"] = os.pathsep.join(whole)
            try:
                yield
            finally:
                if before is not None:
                    os.environ["PYTHONPATH"] = before
                elif self.paths:
                    del os.environ["PYTHONPATH"]


def working_tree(command: Sequence[str]) -> Tree:
    """Return the source in this working tree."""
    return Tree(name="head", folder=Path.cwd(), command=tuple(command))


@contextlib.contextmanager
def base_tree(base: str, command: Sequence[str]) -> Iterator[Tree]:
    """Provide the source of a revision, or of a folder with another checkout."""
    if Path(base).is_dir():
        yield Tree(name=base, folder=Path(base).resolve(), command=_moved(command, Path.cwd(), Path(base)))
        return
    top = Path(_git("rev-parse", "--show-toplevel", hint="or name a folder: --base DIR"))
    revision = _git(
        "rev-parse",
        "--verify",
        "--quiet",
        f"{base}^{{commit}}",
        hint="name a branch, a tag, a commit, or a folder; a shallow clone has only its newest commit",
        failed=f"there is no revision {base!r} here",
    )
    with tempfile.TemporaryDirectory(prefix="flatout-base-") as made:
        tree = Path(made).resolve() / "tree"
        _write_revision(revision, top, tree)
        _link_untracked(top, tree)
        folder = tree / Path.cwd().relative_to(top.resolve())
        if not folder.is_dir() or not folder.resolve().is_relative_to(tree):
            raise BadInput(
                f"{base} has no folder {Path.cwd().relative_to(top.resolve())}",
                hint="run in a folder that it has, such as the top",
            )
        yield Tree(
            name=f"{base} ({revision[:9]})",
            folder=folder,
            command=_moved(command, top.resolve(), tree),
            paths=_paths_inside(top.resolve(), tree),
        )


def _moved(command: Sequence[str], here: Path, there: Path) -> tuple[str, ...]:
    """Move an absolute path of the command's script to the other tree."""
    script = Path(command[0])
    if script.is_absolute() and script.resolve().is_relative_to(here):
        return (str(there / script.resolve().relative_to(here)), *command[1:])
    return tuple(command)


def _write_revision(revision: str, top: Path, tree: Path) -> None:
    tree.mkdir()
    variables = {**os.environ, "GIT_INDEX_FILE": str(tree.parent / "index")}
    _git("read-tree", revision, folder=top, variables=variables)
    _git("checkout-index", "--all", f"--prefix={tree}/", folder=top, variables=variables)


def _link_untracked(top: Path, tree: Path) -> None:
    listed = _git("ls-files", "--others", "--directory", "-z", folder=top)
    for name in filter(None, listed.split("\0")):
        path = Path(name)
        target = tree / path
        if any(part in LEFT_OUT for part in path.parts) or os.path.lexists(target):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.parent.resolve().is_relative_to(tree):  # not through a link into the working tree
            target.symlink_to(top / path)


def _paths_inside(top: Path, tree: Path) -> tuple[str, ...]:
    found = []
    for name in sys.path:
        path = Path(name or ".").resolve()
        if path.is_relative_to(top) and path != Path.cwd():
            moved = tree / path.relative_to(top)
            if moved.is_dir() and moved.resolve().is_relative_to(tree):  # a linked environment is shared
                found.append(str(moved))
    return tuple(dict.fromkeys(found))


def _git(
    *arguments: str,
    folder: Path | None = None,
    variables: dict[str, str] | None = None,
    hint: str | None = None,
    failed: str | None = None,
) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise BadInput("git is not installed", hint="name a folder: --base DIR") from None
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise BadInput(failed or f"git {arguments[0]} failed: {words[-1] if words else ''}", hint=hint)
    return done.stdout.rstrip("\n")
