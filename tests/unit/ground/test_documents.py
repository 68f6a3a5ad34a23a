"""A document is read as it was written, and anything else is refused in one sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from flatout.ground.documents import DocumentKind, read_document, show_diff, write_document
from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    scores: tuple[float, ...]
    name: str | None = None


KIND = DocumentKind(format="test-study", version=2, what="a study", hint="make one")


def read(path: Path) -> Study:
    return read_document(path, Study, KIND)


def test_what_is_written_is_read_and_so_are_earlier_versions(tmp_path: Path) -> None:
    study = Study(scores=(0.5, 1.0), name="x")
    for version in (1, 2):
        write_document(tmp_path / "deep" / "study.json", study, replace(KIND, version=version))
        assert read(tmp_path / "deep" / "study.json") == study


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("[]", "is not a study"),
        ('{"format": "other", "version": 1}', "is not a study .make one"),
        ('{"format": "test-study"}', "has version None"),
        ('{"format": "test-study", "version": 3}', "has version 3; this flatout reads up to 2"),
        ('{"format": "test-study", "version": 1}', r"is damaged: Study\.scores is missing"),
    ],
)
def test_anything_else_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "study.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=said) as raised:
        read(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(BadInput, match=r"absent\.json does not exist; a study is needed"):
        read(tmp_path / "absent.json")


def test_the_diff_is_one_that_patch_tools_read() -> None:
    shown = show_diff({"m.py": ("a\nb\n", "a\nc\n")})
    assert shown == "--- a/m.py\n+++ b/m.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
    ended = show_diff({"m.py": ("a\f\nb", "a\f\nb\n")})
    assert ended == "--- a/m.py\n+++ b/m.py\n@@ -1,2 +1,2 @@\n a\f\n-b\n\\ No newline at end of file\n+b\n"
