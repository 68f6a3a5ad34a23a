"""`flatout fetch` says where the model is; `--json` has its hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flatout.cli.app import application
from flatout.engines.run.fetch_model import MODELS, FetchedModel
from flatout.ground.errors import BadInput


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch_model(name: str, folder: Path, *, source: str, on_progress: Any) -> FetchedModel:
        if name not in MODELS:
            raise BadInput(f"there is no model {name!r} to fetch")
        on_progress("fetching")
        return FetchedModel(
            name=name, title="Tiny", folder=str(folder), source=source, sha256="ab", num_bytes=9, note="lossy"
        )

    monkeypatch.setattr("flatout.api.fetch_model", fetch_model)


def test_one_line_or_one_document(fetched: None) -> None:
    done = CliRunner().invoke(application(), ["fetch", "minilm", "m", "--source", "hub"])
    assert (done.exit_code, done.stdout) == (0, "Tiny in m, 9 B from hub; lossy\n")
    done = CliRunner().invoke(application(), ["fetch", "minilm", "m", "--json"])
    assert json.loads(done.stdout)["sha256"] == "ab"
    done = CliRunner().invoke(application(), ["fetch", "bert", "m"])
    assert done.exit_code == 2 and "there is no model 'bert'" in done.stderr


def test_every_model_is_in_the_help() -> None:
    said = CliRunner().invoke(application(), ["fetch", "--help"]).stdout
    assert all(name in said and MODELS[name].title in said for name in MODELS)
