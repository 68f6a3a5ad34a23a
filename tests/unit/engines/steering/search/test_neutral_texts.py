"""Neutral texts: ours, or a file's."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.engines.steering.search.neutral_texts import NEUTRAL, read_neutral
from flatout.errors import BadInput


def test_ours_are_distinct_sentences() -> None:
    assert len(set(NEUTRAL)) == len(NEUTRAL) >= 10
    assert all(len(text.split()) > 8 and text.endswith(".") for text in read_neutral(None))


def test_a_file_gives_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "neutral.txt"
    path.write_text("one\n\n  two \n")
    assert read_neutral(path) == ["one", "two"]


def test_a_file_without_texts_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_neutral(tmp_path / "absent.txt")
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(BadInput, match="holds no text"):
        read_neutral(tmp_path / "empty.txt")
