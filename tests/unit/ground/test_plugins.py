"""Entry points of installed packages are loaded by group."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.ground.plugins import load_plugins


def install(folder: Path, entries: str) -> None:
    metadata = folder / "extra_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[flatout.test_group]\n{entries}")


def test_objects_by_the_names_of_their_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_plugins("flatout.test_group") == {}
    install(tmp_path, "second = json:loads\nfirst = json\n")
    monkeypatch.syspath_prepend(tmp_path)
    import json

    found = load_plugins("flatout.test_group")
    assert list(found) == ["first", "second"] and found == {"first": json, "second": json.loads}


def test_what_cannot_be_loaded_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "first = no_such_module_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match=r"extra-package adds 'first' to .*\(mend or uninstall extra-package"):
        load_plugins("flatout.test_group")
