"""What a worker holds: an engine for the model it has, and the study of its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.engines.steering.search.search_worker import storage_of, study_of
from flatout.engines.steering.settings import make_settings
from flatout.ground.errors import BadInput

GIVEN = {"model": "m", "questions": "q.jsonl"}


def test_a_study_lies_in_the_run_folder_or_where_the_settings_say(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    assert storage_of(make_settings({**GIVEN, "out": out})) == f"{out}/study.journal"
    elsewhere = make_settings({**GIVEN, "out": out, "storage": "grpc://host:1"})
    assert storage_of(elsewhere) == "grpc://host:1"
    study = study_of(make_settings({**GIVEN, "out": out, "seed": 3}), worker="a")
    assert study.study.study_name == "run" and study.seed == 3
    assert study.rows.folder == tmp_path / "run" / "rows"


def test_a_storage_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be reached"):
        study_of(make_settings({**GIVEN, "out": str(tmp_path / "file" / "run")}), worker="0")
