from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout import api
from flatout.ground.errors import BadInput


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
