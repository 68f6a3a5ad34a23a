from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout import api
from flatout.doctor.examine import Diagnosis
from flatout.ground.errors import BadInput


def test_the_package_hands_these_out() -> None:
    assert flatout.diagnose is api.diagnose
    assert flatout.Diagnosis is Diagnosis


def test_every_verb_is_a_function() -> None:
    assert len(api.__all__) > 40
    assert all(callable(getattr(api, name)) for name in api.__all__)


@pytest.mark.parametrize("verb", [api.evolve, api.steer])
def test_changes_join_the_settings_of_a_file(verb: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("model: absent\n")
    with pytest.raises(BadInput, match="no_such_setting"):
        verb(config, changes={"no_such_setting": 1})


def test_a_run_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="absent"):
        api.adapt_status("absent")
