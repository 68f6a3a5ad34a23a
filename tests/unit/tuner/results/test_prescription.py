from __future__ import annotations

from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.tuner.results.machine import Machine
from flatout.tuner.results.prescription import Kept, Prescription, Proof, load_prescription, save_prescription
from flatout.tuner.treatment import Dose

PROOF = Proof(
    ratio=1.5, low=1.4, high=1.6, noise_low=0.99, noise_high=1.01, reproducible=True, step_s=0.02,
    date="2026-01-01",
)  # fmt: skip
MACHINE = Machine(
    device="cpu",
    cpu='a "quoted" one',
    cores=2.0,
    launch_s=1.5e-6,
    python="3.11",
    torch="2.13",
    flatout="0.1.0",
)
KEPT = (
    Kept(name="loader-workers", value=4, safety="exact", ratio=1.3, low=1.2, high=1.4, checked="bit for bit"),
    Kept(name="compile", value="default", safety="reordered", ratio=1.2, low=1.1, high=1.3, checked="near"),
    Kept(name="pinned-memory", value=True, safety="exact", ratio=1.1, low=1.05, high=1.2, checked="equal"),
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = Prescription(command=("train.py", "--name", "ä"), treatments=KEPT, proof=PROOF, machine=MACHINE)
    save_prescription(made, tmp_path / "flatout.toml")
    assert load_prescription(tmp_path / "flatout.toml") == made
    assert made.doses()[0] == Dose(name="loader-workers", value=4)
    assert [str(dose) for dose in made.doses()] == ["loader-workers 4", "compile default", "pinned-memory"]


def test_one_without_proof_or_treatments_is_read_too(tmp_path: Path) -> None:
    made = Prescription(command=("train.py",), treatments=())
    save_prescription(made, tmp_path / "flatout.toml")
    assert load_prescription(tmp_path / "flatout.toml") == made


MAGIC = """
command = ["t.py"]
[[treatments]]
name = "magic"
value = true
safety = "exact"
ratio = 1.0
low = 1.0
high = 1.0
checked = ""
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("treatments = [", "is not TOML"),
        ("version = 9", "has version 9"),
        ('command = "train.py"\ntreatments = []', "command"),
        (MAGIC, "no treatment 'magic'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "flatout.toml").write_text(text)
    with pytest.raises(BadInput, match=words):
        load_prescription(tmp_path / "flatout.toml")


def test_a_missing_file_names_the_verb_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as raised:
        load_prescription(tmp_path / "flatout.toml")
    assert raised.value.hint == "flatout tune SCRIPT writes one"


def test_one_by_hand_needs_names_and_values_only(tmp_path: Path) -> None:
    (tmp_path / "flatout.toml").write_text('[[treatments]]\nname = "loader-workers"\nvalue = 4\n')
    found = load_prescription(tmp_path / "flatout.toml")
    assert [str(dose) for dose in found.doses()] == ["loader-workers 4"]
    assert found.proof is None and found.treatments[0].checked == "not verified"
