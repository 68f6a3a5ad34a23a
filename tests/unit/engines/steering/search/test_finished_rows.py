from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.engines.steering.search.finished_rows import FinishedRow, RowLog
from flatout.ground.errors import BadInput

ROWS = [
    FinishedRow(trial=0, question="a", value=0.25),
    FinishedRow(trial=None, question="a", value=0.5, text="said\nso"),
    FinishedRow(trial=1, question="b", value=None),
]


def add(log: RowLog, rows: list[FinishedRow]) -> None:
    for row in rows:
        log.add(row)


def test_rows_are_found_again(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "rows")
    add(log, ROWS)
    for found in (log, RowLog(tmp_path / "rows")):
        assert len(found) == 3
        assert [found.find(row.trial, row.question) for row in ROWS] == ROWS
        assert found.find(1, "a") is None


def test_every_worker_reads_what_all_have_finished(tmp_path: Path) -> None:
    first, second = RowLog(tmp_path, worker="a"), RowLog(tmp_path, worker="b")
    add(first, ROWS[:1])
    assert second.find(0, "a") is None
    second.reload()
    assert second.find(0, "a") == ROWS[0]
    with pytest.raises(BadInput, match=r"the worker name '\.\./b'"):
        RowLog(tmp_path, worker="../b")


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_line_is_never_read_and_never_appended_to(tmp_path: Path, cut: int) -> None:
    add(RowLog(tmp_path), ROWS)
    path = tmp_path / "0.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    other = RowLog(tmp_path, worker="other")
    assert len(other) == 2
    assert path.read_bytes()[-1:] != b"\n", "another worker's file is left alone: it may be writing"
    log = RowLog(tmp_path)
    assert len(log) == 2
    add(log, ROWS[2:])
    assert len(RowLog(tmp_path)) == 3


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    add(RowLog(tmp_path), ROWS)
    path = tmp_path / "0.jsonl"
    path.write_text(path.read_text().replace('"value": 0.5', '"value": "much"'))
    with pytest.raises(BadInput, match=r"0\.jsonl, line 2: not a finished row"):
        RowLog(tmp_path)


def test_a_killed_process_loses_no_finished_row(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from flatout.engines.steering.search.finished_rows import FinishedRow, RowLog\n"
        "log = RowLog(Path(sys.argv[1]))\n"
        "for number in range(20): log.add(FinishedRow(trial=number, question='q', value=1.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(RowLog(tmp_path)) == 20


def test_a_full_disk_keeps_what_was_written(tmp_path: Path) -> None:
    log = RowLog(tmp_path)
    add(log, ROWS[:2])
    path = tmp_path / "0.jsonl"
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        with pytest.raises(BadInput, match=r"cannot be written.*no row is lost"):
            add(log, ROWS[2:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
