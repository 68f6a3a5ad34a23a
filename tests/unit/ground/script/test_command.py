from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.ground.script.command import check_command

NOTEBOOK = Path(__file__).parents[3] / "data" / "notebook.ipynb"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "no script given"),
        (["absent.py"], "no script at absent.py"),
        (["."], ". is a folder"),
        ([str(NOTEBOOK)], "is a notebook, not a script"),
    ],
)
def test_what_cannot_run_is_refused(command: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_command(command, module=False)


def test_a_folder_that_python_can_run_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("")
    check_command([str(tmp_path)], module=False)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose import would fail loudly, a namespace package, and a plain module."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "loud_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    (package / "train.py").write_text("")
    inner = tmp_path / "bare_namespace" / "inner"
    inner.mkdir(parents=True)
    (inner / "train.py").write_text("")
    (tmp_path / "plain_module.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["loud_package.train", "plain_module", "bare_namespace.inner.train", "json.tool", "flatout"]
)
def test_a_module_that_python_would_find_is_found_without_importing_it(packages: Path, name: str) -> None:
    path = list(sys.path)
    check_command([name], module=True)
    assert "loud_package" not in sys.modules
    assert sys.path == path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("loud_package.serve", "there is no module 'loud_package.serve'"),
        ("loud_package", "'loud_package' is a package without __main__"),
        ("plain_module.part", "'plain_module' is not a package"),
        ("no_such_module.part", "there is no module 'no_such_module'"),
        ("plain_module.py", "'plain_module' is not a package"),
        ("dir/train.py", "'dir/train.py' is not a module name"),
        ("", "'' is not a module name"),
    ],
)
def test_a_module_that_cannot_run_is_bad_input(packages: Path, name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_command([name], module=True)
