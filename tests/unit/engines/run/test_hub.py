"""A model by its id: fetched where there is a network, one line where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from flatout.engines.run.hub import FETCHED, find_model, is_model_id
from flatout.ground.errors import BadInput


def test_a_folder_is_itself_and_no_question_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    for name in ("models/mine", "models/typo", str(tmp_path / "absent"), "../up/there", "plain"):
        assert not is_model_id(name) or Path(name).is_dir()
        assert find_model(name) == Path(name)


def test_an_id_is_fetched_without_anything_that_could_hold_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any]] = []

    def fetched(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert find_model("owner/some-model") == tmp_path
    assert asked == [("owner/some-model", FETCHED)]
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in FETCHED)


def test_without_a_network_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand more of it")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(BadInput, match=r"no model folder at owner/name, .*: no connection") as told:
        find_model(Path("owner/name"))
    assert "more of it" not in str(told.value)
