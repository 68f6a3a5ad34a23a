"""Whole or not at all: by killing real writers, filling real disks, and leaving locks behind."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.ground.atomic_files import PARTIAL, cut_torn_line, remove_leftovers, whole_folder, write_whole
from flatout.ground.errors import BadInput

# A writer that is killed with half of its bytes on the disk.
KILLED = """
import os, signal, sys
from pathlib import Path
from flatout.ground import atomic_files
written = os.write
def half(handle, content):
    written(handle, content[: len(content) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
os.write = half
atomic_files.write_whole(Path(sys.argv[1]), b"x" * 1000)
"""

# A disk of its own, of one MiB, in a name space of its own.
SMALL_DISK = """
import sys
from pathlib import Path
from flatout.ground.atomic_files import write_whole
from flatout.ground.errors import BadInput
folder = Path(sys.argv[1])
write_whole(folder / "first", b"a" * 400_000)
try:
    write_whole(folder / "second", b"b" * 900_000)
except BadInput as error:
    print(error)
print(sorted(path.name for path in folder.iterdir()), (folder / "first").read_bytes() == b"a" * 400_000)
"""


def python(code: str, *arguments: Path | str) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def test_a_file_is_written_and_replaced_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"one")
    write_whole(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_writer_killed_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"finished")
    done = subprocess.run(python(KILLED, tmp_path / "file"), check=False)
    assert done.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.glob(f".*{PARTIAL}")
    assert leftover.stat().st_size == 500
    assert (tmp_path / "file").read_bytes() == b"finished"
    assert remove_leftovers(tmp_path) == [leftover.name]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    mounted = f"mount -t tmpfs -o size=1m none {tmp_path} && exec " + '"$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, "sh"]
    probe = subprocess.run([*command, "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("no disk of its own can be mounted here")
    done = subprocess.run(
        [*command, *python(SMALL_DISK, tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said, left = done.stdout.splitlines()
    assert "No space left on device" in said
    assert "free some space" in said
    assert left == "['first'] True"


def test_a_limit_on_file_sizes_leaves_nothing(tmp_path: Path) -> None:
    """The system's own refusal, here and without a disk to fill."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(BadInput, match="cannot be written"):
            write_whole(tmp_path / "file", b"x" * 4000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.iterdir())


def test_a_leftover_is_removed_only_when_its_writer_is_gone(tmp_path: Path) -> None:
    leftover = tmp_path / f".file-1{PARTIAL}"
    handle = os.open(leftover, os.O_CREAT | os.O_WRONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert remove_leftovers(tmp_path) == []
    os.close(handle)
    assert remove_leftovers(tmp_path, of="other") == []
    assert remove_leftovers(tmp_path, of="file") == [leftover.name]


def test_a_folder_is_made_and_one_that_cannot_be_is_named(tmp_path: Path) -> None:
    write_whole(tmp_path / "absent" / "file", b"x")
    assert (tmp_path / "absent" / "file").read_bytes() == b"x"
    with pytest.raises(BadInput, match="Not a directory"):
        write_whole(tmp_path / "absent" / "file" / "deeper" / "file", b"")


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def half(final: Path) -> None:
        with whole_folder(final) as partial:
            (partial / "a").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half(tmp_path / "all" / "one")
    assert not list((tmp_path / "all").iterdir()), "nothing is left to fill a full disk"
    (tmp_path / "all" / f".three{PARTIAL}").mkdir()  # of a process that was killed
    with whole_folder(tmp_path / "all" / "two") as partial:
        (partial / "a").write_text("whole")
        assert not (tmp_path / "all" / "two").exists()
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["two"], "the leftover is gone"
    assert (tmp_path / "all" / "two" / "a").read_text() == "whole"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_files_of_a_folder_get_the_mode_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with whole_folder(tmp_path / "one") as partial:
            (partial / "deeper").mkdir()
            for path, given in ((partial / "a", 0o600), (partial / "deeper" / "b", 0o666)):
                path.touch()
                path.chmod(given)
    finally:
        os.umask(before)
    found = {
        path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "one").rglob("*") if path.is_file()
    }
    assert found == {"a": mode, "b": mode}


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert cut_torn_line(path) == 0
    path.write_bytes(b"whole\ntorn")
    assert cut_torn_line(path) == 6 == path.stat().st_size
    path.write_bytes(b"torn")
    assert cut_torn_line(path) == 0 == path.stat().st_size
