from __future__ import annotations

from pathlib import Path

import pytest

from flatout.tuner.trial.journal import Journal, evidence_of, journal_path
from flatout.tuner.trial.meter import StepHashes, TrialResult

ONE = TrialResult(ended="measured", losses=(1.0, 0.5), checked={"1": StepHashes(gradients=("a",))})
OTHER = TrialResult(ended="killed", error="did not end")


def test_results_come_back_in_their_order_and_only_for_the_same_job(tmp_path: Path) -> None:
    path, job = tmp_path / "x" / "train-tuning.jsonl", {"command": ["train.py"]}
    first = Journal(path, job=job, evidence=tmp_path / "evidence.json")
    first.add("a", ONE)
    first.add("b", OTHER)
    first.add("a", OTHER)
    with path.open("a") as file:
        file.write('{"key": "a", "resu')  # cut off by an interrupt
    again = Journal(path, job=job, resume=True)
    assert again.num_known == 3 and again.count("a") == 2
    assert [again.find("a"), again.find("a"), again.find("a")] == [(ONE,), (OTHER,), None]
    again.add("c", ONE, OTHER)  # behind what was cut off
    assert again.find("c") is None  # who runs a trial has its result
    again.add("d", ONE, ahead=True)
    assert again.find("d") == (ONE,)
    third = Journal(path, job=job, resume=True)
    assert (third.find("b"), third.find("c"), third.find("d")) == ((OTHER,), (ONE, OTHER), (ONE,))
    assert Journal(path, job={"command": ["other.py"]}, resume=True).num_known == 0
    again.close()
    assert not path.parent.exists()


def test_a_tuning_goes_on_with_its_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = journal_path(("a/train.py", "--x"))
    assert path == tmp_path / ".flatout" / "train-tuning.jsonl" and evidence_of(path) is None
    evidence = tmp_path / "evidence.json"
    Journal(path, job={}, evidence=evidence)
    assert evidence_of(path) is None  # it is gone
    evidence.write_text("{}")
    assert evidence_of(path) == evidence
    path.write_text("nonsense")
    assert evidence_of(path) is None and Journal(path, job={}, resume=True).num_known == 0
