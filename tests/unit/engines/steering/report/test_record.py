"""A record survives its file, and a file that is none of ours is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.engines.steering.report.record import Interval, Retest, load_record, save_record
from flatout.ground.errors import BadInput
from tests.support.steering import hostile_study, study


@pytest.mark.parametrize("record", [study(), hostile_study(), study(trials=(), best=None, retest=None)])
def test_a_record_survives_its_file(record: object, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    save_record(record, path)  # type: ignore[arg-type]
    assert load_record(path) == record
    assert [each.name for each in path.parent.iterdir()] == ["result.json"]


def test_the_winner_is_found_by_its_number() -> None:
    record = study()
    assert record.winner is not None and record.winner.number == record.best
    assert study(best=None).winner is None
    assert record.count("complete") + record.count("pruned") == len(record.trials)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with pytest.raises(BadInput, match="does not exist; a study of flatout steer is needed"):
        load_record(path)
    for content, words in (
        ("{", "cannot be read"),
        ("[]", "is not a study"),
        ('{"format": "flatout-steering", "version": 9}', "version 9"),
        ('{"format": "flatout-steering", "version": 1, "name": 3}', "damaged"),
    ):
        path.write_text(content)
        with pytest.raises(BadInput, match=words):
            load_record(path)


def test_no_number_of_the_file_is_without_a_value(tmp_path: Path) -> None:
    save_record(study(), tmp_path / "result.json")
    document = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert document["version"] == 1


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        save_record(study(), tmp_path / "file" / "result.json")


def test_the_headline_says_what_is_known() -> None:
    assert "raises the answer preference by 0.93 on 50 fresh questions" in study().headline()
    assert "not been tested on fresh questions" in study(retest=None).headline()
    assert study(best=None).headline() == "No trial has been scored yet."
    around = Interval(value=0.02, low=-0.1, high=0.14)
    retest = Retest(num_questions=50, baseline=around, steered=around, difference=around)
    assert "within the noise" in study(retest=retest).headline()
    below = Interval(value=-0.4, low=-0.5, high=-0.3)
    retest = Retest(num_questions=50, baseline=around, steered=around, difference=below)
    assert "lowers the answer preference by 0.4" in study(retest=retest).headline()
    alone = Interval(value=0.9, low=None, high=None)
    few = study(retest=Retest(num_questions=2, baseline=alone, steered=alone, difference=alone))
    assert "2 fresh questions are too few to tell" in few.headline()
