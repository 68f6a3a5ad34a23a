"""What a worker holds: an engine for the model it has, and the study of its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatout.engines.steering.load_model import load_model
from flatout.engines.steering.search.run_search import split_of
from flatout.engines.steering.search.search_worker import SearchWorker, storage_of, study_of
from flatout.engines.steering.settings import make_settings
from flatout.ground.errors import BadInput
from tests.support.steering import tiny_search, write_tiny

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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("steering"))


@pytest.mark.parametrize(
    ("changes", "num_workers", "wanted"),
    [
        ({"trials": 1000, "rungs": 1}, 1, 50),
        (
            {"trials": 1000, "rungs": 3},
            1,
            400,
        ),  # 1, 2 and 4 questions: the second rung has half a row a trial
        ({"trials": 1000, "rungs": 1, "rows": 40}, 1, 32),
        ({"trials": 200, "rungs": 3}, 1, 100),  # the sampler learns once
        ({"trials": 200, "rungs": 3}, 4, 25),
        ({"trials": 1, "rungs": 3}, 4, 1),
    ],
)
def test_as_many_trials_are_halved_together_as_fill_the_rows(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], num_workers: int, wanted: int
) -> None:
    settings = make_settings(tiny_search(tiny, tmp_path / "run", **{"rows": 200, **changes}))
    split = split_of(settings)
    split = split._replace(search=split.search[:4])
    worker = SearchWorker(
        settings, split, load_model(tiny / "model"), {}, on_progress=lambda _: None, on_event=lambda _: None
    )
    assert len(split.search) == 4
    assert worker.batch_trials(num_workers=num_workers) == wanted
