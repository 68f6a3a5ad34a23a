"""A log that another process writes is followed line by line, through cuts, new files and compression."""

from __future__ import annotations

import gzip
from pathlib import Path

from flatout.monitor.past.history import Grain, HistoryWriter
from flatout.monitor.past.history_tail import RunLog
from tests.support.monitor_web import START_S, logged_run, sample

SMALL = (
    Grain(name="raw", period_s=0.0, budget_bytes=60_000, segment_bytes=8_000),
    Grain(name="minutes", period_s=60.0, budget_bytes=60_000, segment_bytes=8_000),
    Grain(name="hours", period_s=3600.0, budget_bytes=60_000, segment_bytes=8_000),
)


def seconds(samples: list[object]) -> list[float]:
    return [one.time_s - START_S for one in samples]  # type: ignore[attr-defined]


def test_the_past_is_the_log_and_more_is_what_was_appended(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    for second in range(5):
        writer(sample(second))
    log = RunLog(tmp_path)
    assert seconds(log.past()) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert log.more() == []
    writer(sample(5))
    writer(sample(6))
    assert seconds(log.more()) == [5.0, 6.0]
    assert log.more() == []
    writer.close()


def test_every_sample_is_seen_once_while_files_fill_and_are_compressed(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, grains=SMALL)
    writer(sample(0))
    log = RunLog(tmp_path)
    seen = seconds(log.past())
    for second in range(1, 90):
        writer(sample(second))
        if second % 3 == 0:
            seen += seconds(log.more())
    writer.close()
    seen += seconds(log.more())
    assert list(tmp_path.glob("raw-*.gz"))
    assert seen == [float(second) for second in range(90)]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer(sample(0))
    writer(sample(1))
    writer.close()
    path = tmp_path / "raw-000001.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:100])
    log = RunLog(tmp_path)
    assert seconds(log.past()) == [0.0]
    assert log.more() == []
    path.write_bytes(first + second)
    assert seconds(log.more()) == [1.0]


def test_a_damaged_line_is_left_out_and_a_folder_may_vanish(tmp_path: Path) -> None:
    folder = logged_run(tmp_path, [sample(0), sample(1)])
    path = folder / "raw-000001.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"time_s": "when"}\n\xff\xfe\n[]\n' + second)
    log = RunLog(folder)
    assert seconds(log.past()) == [0.0, 1.0]
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert log.more() == []
    assert RunLog(folder).past() == []


def test_a_file_cut_while_it_was_compressed_is_read_later(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer(sample(0))
    log = RunLog(tmp_path)
    log.past()
    writer(sample(1))
    writer.close()
    path = tmp_path / "raw-000001.jsonl"
    whole = gzip.compress(path.read_bytes())
    path.unlink()
    packed = tmp_path / "raw-000001.jsonl.gz"
    packed.write_bytes(whole[: len(whole) // 2])
    assert log.more() == []
    packed.write_bytes(whole)
    assert seconds(log.more()) == [1.0]


def test_of_a_long_run_the_end_is_fine_and_the_beginning_coarse(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, grains=SMALL)
    for second in range(0, 7200, 10):
        writer(sample(second))
    writer.close()
    past = RunLog(tmp_path).past()
    times = seconds(past)  # type: ignore[arg-type]
    assert times == sorted(times)
    assert times[-2:] == [7180.0, 7190.0]
    assert times[1] - times[0] >= 60.0
    assert len(times) < 720
