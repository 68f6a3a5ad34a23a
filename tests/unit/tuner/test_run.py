from __future__ import annotations

from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.tuner.results.prescription import Prescription
from flatout.tuner.run import announce, announce_patches, run
from tests.unit.tuner.patches.test_apply import PATCHED, patched_prescription
from tests.unit.tuner.patches.test_patch import LOOP
from tests.unit.tuner.results.test_prescription import KEPT, MACHINE, PROOF


def test_a_missing_prescription_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no prescription at") as raised:
        run(["train.py"], module=False, prescription=tmp_path / "flatout.toml")
    assert raised.value.hint == "flatout tune train.py writes one"


def test_what_is_applied_is_said_in_one_line() -> None:
    made = Prescription(command=("train.py",), treatments=KEPT[:1], proof=PROOF)
    assert announce(made) == "loader-workers 4; 1.50× when it was tuned"
    assert "no proof" in announce(Prescription(command=("train.py",), treatments=KEPT[:1]))
    assert "runs as it is" in announce(Prescription(command=("train.py",), treatments=()))


def test_a_proof_of_another_machine_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Prescription(command=("train.py",), treatments=KEPT[:1], proof=PROOF, machine=MACHINE)
    monkeypatch.setattr("flatout.tuner.run.differences", lambda machine: ["2 cores instead of 64"])
    assert announce(made).endswith(
        "on other hardware (2 cores instead of 64): flatout tune train.py proves it here"
    )


def test_patches_that_the_file_does_not_have_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = patched_prescription()
    for text, words in (
        (LOOP, ["not applied: rows-at-once in model.py; flatout tune --apply"]),
        (PATCHED, []),
    ):
        Path("model.py").write_text(text)
        said = announce_patches(made)
        assert len(said) == len(words) and all(map(str.startswith, said, words))
    Path("model.py").unlink()
    assert "not the file that it was proven on" in announce_patches(made)[0]
