"""Packages are fetched once, checked, and unpacked whole or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from flatout.ground import packages
from flatout.ground.errors import NotFetched


def tiny_package(folder: Path, **changes: Any) -> Any:
    """A wheel of one file in `folder`, and the package that names it."""
    wheel = folder / "flatout_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.txt", "hello")
        archive.writestr(
            "flatout_tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: flatout-tiny\nVersion: 1.0\n"
        )
        archive.writestr(
            "flatout_tiny-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("flatout_tiny-1.0.dist-info/RECORD", "")
    values = {
        "name": "flatout-tiny",
        "version": "1.0",
        "index": "pip",
        "num_bytes": wheel.stat().st_size,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "holds": "a greeting",
    }
    return packages.Package(**{**values, **changes})


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees one folder and no index; the cache is empty."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    return folder


def test_a_package_is_fetched_once_and_says_so(offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tiny_package(offline)
    assert not packages.folder_of(package).is_dir()
    folder = packages.fetch(package)
    assert (folder / "tiny.txt").read_text() == "hello"
    said = capsys.readouterr().err
    assert "fetching flatout-tiny 1.0 with pip, 0.00 MB: a greeting" in said and str(folder) in said
    (offline / "flatout_tiny-1.0-py3-none-any.whl").unlink()
    assert packages.fetch(package) == folder
    assert capsys.readouterr().err == ""
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_package_that_is_another_one_is_refused(offline: Path) -> None:
    package = tiny_package(offline, sha256="0" * 64)
    with pytest.raises(NotFetched, match="it is not what was tested"):
        packages.fetch(package)
    assert not packages.folder_of(package).is_dir()


def test_without_a_network_the_way_on_is_named(offline: Path) -> None:
    with pytest.raises(NotFetched, match=r"could not fetch .* copy"):
        packages.fetch(packages.MINILM)
