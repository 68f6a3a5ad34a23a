"""Edits of the proven file; another file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.tuner.patches.apply import edits_of
from flatout.tuner.patches.patch import sha256
from flatout.tuner.results.prescription import KeptPatch, Prescription, load_prescription, save_prescription
from tests.unit.tuner.patches.test_patch import LOOP


def prescription() -> Prescription:
    kept = KeptPatch(
        name="rows-at-once", value="model.py:6", file="model.py", sha256=sha256(LOOP), safety="reordered",
        ratio=2.0, low=1.9, high=2.1, checked="yes",
    )  # fmt: skip
    return Prescription(command=("train.py",), treatments=(), patches=(kept,))


def test_patches_go_into_the_file_they_were_proven_on(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LOOP)
    save_prescription(prescription(), tmp_path / "flatout.toml")
    found = edits_of(load_prescription(tmp_path / "flatout.toml"), folder=tmp_path)
    ((path, (before, after)),) = found.items()
    assert path == tmp_path / "model.py" and before.decode() == LOOP and b".append" not in after


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LOOP + "\n# changed\n")
    with pytest.raises(BadInput, match=r"model.py is not the file that rows-at-once was proven on"):
        edits_of(prescription(), folder=tmp_path)
    (tmp_path / "model.py").write_text("import torch\n")
    with pytest.raises(BadInput, match="cannot be written"):
        edits_of(prescription(), folder=tmp_path)
    with pytest.raises(BadInput, match="holds no patch"):
        edits_of(Prescription(command=("train.py",), treatments=()), folder=tmp_path)
