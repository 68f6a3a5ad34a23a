from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.tuner.check.trees import base_tree, working_tree


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, a change on top of it, and data that git does not track."""
    top = tmp_path / "job"
    (top / "code" / "lib").mkdir(parents=True)
    (top / "code" / "train.py").write_text("old")
    (top / "code" / "lib" / "model.py").write_text("old")
    (top / ".gitignore").write_text("data/\n")
    git(top, "init", "-q")
    git(top, "add", "-A")
    git(top, "commit", "-qm", "one")
    (top / "code" / "train.py").write_text("new")
    (top / "data").mkdir()
    (top / "data" / "rows").write_text("1 2 3")
    (top / "code" / "__pycache__").mkdir()
    (top / "code" / "__pycache__" / "x.pyc").write_text("")
    monkeypatch.chdir(top / "code")
    return top


def test_a_revision_has_its_own_source_and_the_same_data(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(repository / "code" / "lib")])
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    before = git(repository, "status", "--porcelain")
    script = str(repository / "code" / "train.py")
    with base_tree("HEAD", [script, "--x"]) as tree:
        with tree.entered():
            assert Path("train.py").read_text() == "old" and Path("../data/rows").read_text() == "1 2 3"
            assert not Path("__pycache__").exists()
            assert os.environ["PYTHONPATH"] == f"{tree.folder / 'lib'}{os.pathsep}/elsewhere"
        assert tree.command == (str(tree.folder / "train.py"), "--x")
        assert os.environ["PYTHONPATH"] == "/elsewhere" and Path.cwd() == repository / "code"
    assert not tree.folder.exists() and (repository / "data" / "rows").exists()
    assert git(repository, "status", "--porcelain") == before
    here = working_tree(["train.py"])
    assert (here.folder, here.command, here.paths) == (repository / "code", ("train.py",), ())


def test_a_folder_is_a_tree_as_it_is(repository: Path, tmp_path: Path) -> None:
    with base_tree(str(tmp_path), ["train.py"]) as tree:
        assert (tree.folder, tree.command) == (tmp_path, ("train.py",))
    assert tmp_path.exists()


def test_what_is_no_revision_is_said(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match="no revision 'nowhere'"), base_tree("nowhere", ["train.py"]):
        pass
    (repository / "later").mkdir()
    monkeypatch.chdir(repository / "later")
    with pytest.raises(BadInput, match="has no folder later"), base_tree("HEAD", ["train.py"]):
        pass
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="not a git repository"), base_tree("HEAD", ["train.py"]):
        pass
