"""Edits of the proven file; another file is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flatout import api
from flatout.ground.errors import BadInput
from flatout.tuner.patches.apply import edits_of
from flatout.tuner.patches.patch import PatchSite, rewrite_file, sha256
from flatout.tuner.results.prescription import KeptPatch, Prescription, load_prescription, save_prescription
from tests.unit.tuner.patches.test_patch import LOOP

PATCHED = rewrite_file(LOOP, [PatchSite(patch="rows-at-once", file="model.py", lines=(6,))])


def patched_prescription() -> Prescription:
    kept = KeptPatch(
        name="rows-at-once", value="model.py:6", file="model.py", sha256=sha256(LOOP),
        patched_sha256=sha256(PATCHED), safety="reordered", ratio=2.0, low=1.9, high=2.1, checked="yes",
    )  # fmt: skip
    return Prescription(command=("train.py",), treatments=(), patches=(kept,))


def test_patches_go_into_the_file_they_were_proven_on(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LOOP)
    save_prescription(patched_prescription(), tmp_path / "flatout.toml")
    found = edits_of(load_prescription(tmp_path / "flatout.toml"), folder=tmp_path)
    ((path, (before, after)),) = found.items()
    assert path == tmp_path / "model.py" and before.decode() == LOOP and b".append" not in after


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LOOP + "\n# changed\n")
    with pytest.raises(BadInput, match=r"model.py has changed since rows-at-once was proven on it"):
        edits_of(patched_prescription(), folder=tmp_path)
    made = patched_prescription()
    made = replace(made, patches=(replace(made.patches[0], sha256=sha256("import torch\n")),))
    (tmp_path / "model.py").write_text("import torch\n")
    with pytest.raises(BadInput, match="cannot be written"):
        edits_of(made, folder=tmp_path)
    with pytest.raises(BadInput, match="holds no patch"):
        edits_of(Prescription(command=("train.py",), treatments=()), folder=tmp_path)


def test_files_are_written_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(LOOP)
    save_prescription(patched_prescription(), Path("flatout.toml"))
    assert api.apply_patches(Path("flatout.toml")) == [Path("model.py")]
    assert Path("model.py").read_text() == PATCHED
    with pytest.raises(BadInput, match="already has the patches"):
        api.apply_patches(Path("flatout.toml"))
    Path("model.py").write_text(PATCHED + "# mine\n")
    with pytest.raises(BadInput, match="was changed since the patch was applied"):
        api.undo_patches(Path("flatout.toml"))
    Path("model.py").write_text(PATCHED)
    assert api.undo_patches(Path("flatout.toml")) == [Path("model.py")]
    assert Path("model.py").read_text() == LOOP
    with pytest.raises(BadInput, match="nothing to undo"):
        api.undo_patches(Path("flatout.toml"))
