from __future__ import annotations

import os
from pathlib import Path

import pytest

from flatout.errors import BadInput
from flatout.planner.config.files import check_writable, write_file, write_together


def test_all_files_are_written_and_keep_their_mode(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    one.chmod(0o640)
    write_together({one: b"new", two: b"fresh"})
    assert (one.read_bytes(), two.read_bytes()) == (b"new", b"fresh")
    assert one.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_rename_that_fails_puts_back_those_before_it(tmp_path: Path) -> None:
    """A folder cannot be replaced by a file: the second rename fails for real."""
    one, blocked = tmp_path / "one", tmp_path / "blocked"
    one.write_bytes(b"before")
    absent = tmp_path / "absent"
    contents = {one: b"after", absent: b"made", blocked: b"x"}

    def block() -> None:
        blocked.mkdir()
        (blocked / "inside").write_bytes(b"")

    class Blocking(dict[Path, bytes]):
        """Puts the folder in the way after the files were looked at."""

        def items(self):  # type: ignore[no-untyped-def]
            block()
            return super().items()

    with pytest.raises(BadInput, match="could not write"):
        write_together(Blocking(contents))
    assert one.read_bytes() == b"before"
    assert not absent.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocked", "one"]


def test_a_folder_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.write_bytes(b"before")
    with pytest.raises(
        BadInput, match=r"could not write .*No such file or directory .*no config was changed"
    ):
        write_together({one: b"after", tmp_path / "gone" / "two": b"x"})
    assert one.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"1")
    with pytest.raises(BadInput, match="could not write"):
        write_file(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_what_must_not_be_replaced(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"1")
    check_writable(plain)
    plain.chmod(0o444)
    with pytest.raises(BadInput, match=r"plain is read-only \(nothing was written; allow it with chmod"):
        check_writable(plain)
    link = tmp_path / "link"
    link.symlink_to(plain)
    with pytest.raises(BadInput, match="is a symbolic link to"):
        check_writable(link)
    with pytest.raises(BadInput, match="is not there any more"):
        check_writable(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="is not a plain file"):
        check_writable(tmp_path / "pipe")
