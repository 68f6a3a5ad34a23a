from __future__ import annotations

from pathlib import Path

import pytest

from flatout.engines.run.settings import read_settings
from flatout.errors import BadInput


def read(path: Path) -> dict[str, object]:
    return read_settings(path, names=("sigma", "lr"), verb="evolve")


def test_known_keys_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("sigma: 0.5\n")
    assert read(path) == {"sigma": 0.5}
    path.write_text("")
    assert read(path) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sigm: 1", "did you mean sigma"),
        ("- 1", "holds a list"),
        ("a: [", "cannot be read"),
        ("x: 1", "known: sigma, lr"),
    ],
)
def test_anything_else_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=said) as raised:
        read(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(BadInput, match="no config at"):
        read(tmp_path / "nowhere.yaml")
