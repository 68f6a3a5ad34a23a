from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.tuner.results.prescription import Prescription
from flatout.tuner.run import announce, announce_patches, run
from tests.unit.tuner.patches.test_apply import PATCHED, patched_prescription
from tests.unit.tuner.patches.test_patch import LOOP
from tests.unit.tuner.results.test_prescription import KEPT, MACHINE, PROOF

SCRIPT = ["train.py", "--epochs", "3"]


def test_a_missing_prescription_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no prescription at") as raised:
        run(["train.py"], module=False, prescription=tmp_path / "flatout.toml")
    assert raised.value.hint == "flatout tune train.py writes one"


def test_what_is_applied_is_said_in_one_line() -> None:
    made = Prescription(command=("train.py",), treatments=KEPT[:1], proof=PROOF)
    assert announce(made, SCRIPT) == "loader-workers 4; 1.50× when it was tuned"
    assert announce(made, ["other.py"]) == "loader-workers 4; 1.50× when train.py was tuned"
    assert "no proof" in announce(Prescription(command=("train.py",), treatments=KEPT[:1]), SCRIPT)
    assert "runs as it is" in announce(Prescription(command=("train.py",), treatments=()), SCRIPT)


def test_a_proof_of_another_machine_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Prescription(command=("train.py",), treatments=KEPT[:1], proof=PROOF, machine=MACHINE)
    monkeypatch.setattr("flatout.tuner.run.differences", lambda machine: ["2 cores instead of 64"])
    assert announce(made, SCRIPT).endswith(
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
    assert "has changed since it was proven" in announce_patches(made)[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_becomes_the_script_and_the_first_one_speaks(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flatout.toml").write_text('[[treatments]]\nname = "garbage-every"\nvalue = 2\n')
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    begun: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _path, arguments: begun.append(arguments))
    run(["train.py", "--x"], module=False, prescription=tmp_path / "flatout.toml")
    options = json.loads(begun[0][-1])
    assert options["command"] == ["train.py", "--x"]
    assert options["doses"] == [{"name": "garbage-every", "value": 2}]
    assert ("garbage-every 2" in capsys.readouterr().err) == (rank == 0)
