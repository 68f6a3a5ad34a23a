"""The log of a run: bounded whatever is written, whole after any cut, and replayed without gaps."""

from __future__ import annotations

import gzip
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.monitor.past.history import (
    GRAINS,
    Grain,
    HistoryTail,
    HistoryWriter,
    read_tier,
    replay,
    segments,
)
from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample
from tests.support.monitor_web import START_S as WIDE_START_S
from tests.support.monitor_web import logged_run
from tests.support.monitor_web import sample as wide_sample

SMALL = (
    Grain(name="raw", period_s=0.0, budget_bytes=20_000, segment_bytes=4_000),
    Grain(name="minutes", period_s=60.0, budget_bytes=10_000, segment_bytes=2_000),
    Grain(name="hours", period_s=3600.0, budget_bytes=6_000, segment_bytes=1_000),
)
START_S = 1.7e9 - 1.7e9 % 3600


def sample(second: float, *, num_gpus: int = 1) -> Sample:
    return Sample(
        time_s=START_S + second,
        span_s=1.0,
        host=HostSample(cpu_share=0.5, memory_used_bytes=10**9 + int(second)),
        gpus=tuple(
            GpuSample(index=n, utilisation_share=(second % 100) / 100, energy_j=3e8 + second)
            for n in range(num_gpus)
        ),
        job=JobSample(pid=1, steps=int(second), loss=1 / (second + 1)),
    )


def write(folder: Path, seconds: Iterable[float], *, grains: tuple[Grain, ...] = SMALL) -> HistoryWriter:
    writer = HistoryWriter(folder, grains=grains)
    for second in seconds:
        writer(sample(second))
    return writer


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_short_run_is_replayed_sample_by_sample(tmp_path: Path) -> None:
    write(tmp_path, range(100), grains=GRAINS).close()
    found = list(replay(tmp_path))
    assert [one.time_s for one in found] == [START_S + second for second in range(100)]
    assert found[7].job is not None
    assert found[7].job.loss == pytest.approx(0.125)
    assert found[7].gpus[0].energy_j == 3e8 + 7  # a counter keeps its digits


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num=st.integers(1, 1500), step_s=st.sampled_from([0.1, 1.0, 10.0, 600.0]))
def test_a_log_stays_in_its_budget_and_is_replayed_in_order(
    tmp_path_factory: pytest.TempPathFactory, num: int, step_s: float
) -> None:
    folder = tmp_path_factory.mktemp("log")
    writer = write(folder, (n * step_s for n in range(num)))
    budget = sum(grain.budget_bytes for grain in SMALL)
    assert size_of(folder) <= budget
    writer.close()
    assert size_of(folder) <= budget + 3 * 1_000
    times = [one.time_s for one in replay(folder)]
    assert times == sorted(set(times))
    assert times[-1] == pytest.approx(START_S + (num - 1) * step_s, abs=0.01)


def test_old_parts_are_replayed_coarsely_and_without_gaps(tmp_path: Path) -> None:
    write(tmp_path, range(0, 6 * 3600, 15)).close()
    found = list(replay(tmp_path))
    spans = [one.span_s for one in found]
    assert spans[0] is not None and spans[0] > 60
    assert spans[-1] == 1.0
    # A sample here stands for one second of every fifteen.
    for before, after in itertools.pairwise(found):
        assert after.span_s is not None
        assert after.time_s - after.span_s - before.time_s <= 15.0


def test_a_minute_is_the_mean_of_its_samples(tmp_path: Path) -> None:
    write(tmp_path, range(180)).close()
    minutes = list(read_tier(tmp_path, "minutes"))
    assert [one.span_s for one in minutes] == [60.0, 60.0, 60.0]
    assert minutes[0].gpus[0].utilisation_share == pytest.approx(29.5 / 100, abs=1e-4)
    assert minutes[1].job is not None
    assert minutes[1].job.steps == 119
    (hour,) = read_tier(tmp_path, "hours")
    assert hour.span_s == 180.0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_anywhere_loses_the_last_line_at_most(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    write(folder, range(10), grains=GRAINS)
    (path,) = segments(folder, "raw").values()
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n")
    # A line that lacks only its end is whole all the same.
    assert len(list(read_tier(folder, "raw"))) - complete in (0, 1)


def test_half_a_line_on_a_full_disk_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = write(tmp_path, [1])
    real = os.write
    monkeypatch.setattr("os.write", lambda file, line: real(file, line[:31]))
    with pytest.raises(OSError, match="No space left"):
        writer(sample(2))
    monkeypatch.undo()
    writer(sample(3))
    writer.close()
    assert [one.time_s - START_S for one in read_tier(tmp_path, "raw")] == [1, 3]
    assert len((tmp_path / "raw-000001.jsonl").read_bytes().splitlines()) == 2


def test_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, range(3), grains=GRAINS)
    (path,) = segments(tmp_path, "raw").values()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\x00\xff garbage\n" + lines[2])
    assert len(list(read_tier(tmp_path, "raw"))) == 2


def test_a_log_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, grains=SMALL)
    for second in range(500):
        writer(sample(second))
        if second % 50 == 0:
            *_, last = read_tier(tmp_path, "raw", after_s=START_S + second - 5)
            assert last.time_s == START_S + second


def test_full_files_are_compressed_and_the_current_one_is_not(tmp_path: Path) -> None:
    write(tmp_path, range(60))
    suffixes = [path.suffix for path in segments(tmp_path, "raw").values()]
    assert suffixes[-1] == ".jsonl"
    assert set(suffixes[:-1]) == {".gz"}


def test_a_compression_that_was_cut_off_leaves_the_file_it_came_from(tmp_path: Path) -> None:
    write(tmp_path, range(5), grains=GRAINS)
    (tmp_path / ".raw-000001.jsonl.gz").write_bytes(b"half")
    assert len(list(read_tier(tmp_path, "raw"))) == 5


def test_the_budgets_of_the_product_hold_a_week_of_eight_gpus_in_fifty_megabytes() -> None:
    assert sum(grain.budget_bytes for grain in GRAINS) < 50e6


def test_what_a_writer_holds_does_not_grow(tmp_path: Path) -> None:
    writer = write(tmp_path, (n / 10 for n in range(5000)))
    assert all(len(tier._pending) <= 60 for tier in writer._tiers)


# A log that another process writes is followed line by line, through cuts, new files and compression


WIDER = (
    Grain(name="raw", period_s=0.0, budget_bytes=60_000, segment_bytes=8_000),
    Grain(name="minutes", period_s=60.0, budget_bytes=60_000, segment_bytes=8_000),
    Grain(name="hours", period_s=3600.0, budget_bytes=60_000, segment_bytes=8_000),
)


def seconds(samples: list[object]) -> list[float]:
    return [one.time_s - WIDE_START_S for one in samples]  # type: ignore[attr-defined]


def test_the_past_is_the_log_and_more_is_what_was_appended(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    for second in range(5):
        writer(wide_sample(second))
    log = HistoryTail(tmp_path)
    assert seconds(log.past()) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert log.more() == []
    writer(wide_sample(5))
    writer(wide_sample(6))
    assert seconds(log.more()) == [5.0, 6.0]
    assert log.more() == []
    writer.close()


def test_every_sample_is_seen_once_while_files_fill_and_are_compressed(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, grains=WIDER)
    writer(wide_sample(0))
    log = HistoryTail(tmp_path)
    seen = seconds(log.past())
    for second in range(1, 90):
        writer(wide_sample(second))
        if second % 3 == 0:
            seen += seconds(log.more())
    writer.close()
    seen += seconds(log.more())
    assert list(tmp_path.glob("raw-*.gz"))
    assert seen == [float(second) for second in range(90)]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer(wide_sample(0))
    writer(wide_sample(1))
    writer.close()
    path = tmp_path / "raw-000001.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:100])
    log = HistoryTail(tmp_path)
    assert seconds(log.past()) == [0.0]
    assert log.more() == []
    path.write_bytes(first + second)
    assert seconds(log.more()) == [1.0]


def test_a_damaged_line_is_left_out_and_a_folder_may_vanish(tmp_path: Path) -> None:
    folder = logged_run(tmp_path, [wide_sample(0), wide_sample(1)])
    path = folder / "raw-000001.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"time_s": "when"}\n\xff\xfe\n[]\n' + second)
    log = HistoryTail(folder)
    assert seconds(log.past()) == [0.0, 1.0]
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert log.more() == []
    assert HistoryTail(folder).past() == []


def test_a_file_cut_while_it_was_compressed_is_read_later(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer(wide_sample(0))
    log = HistoryTail(tmp_path)
    log.past()
    writer(wide_sample(1))
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
    writer = HistoryWriter(tmp_path, grains=WIDER)
    for second in range(0, 7200, 10):
        writer(wide_sample(second))
    writer.close()
    past = HistoryTail(tmp_path).past()
    times = seconds(past)  # type: ignore[arg-type]
    assert times == sorted(times)
    assert times[-2:] == [7180.0, 7190.0]
    assert times[1] - times[0] >= 60.0
    assert len(times) < 720


def test_what_is_no_log_among_the_logs_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, range(10)).close()
    first = list(read_tier(tmp_path, "raw"))
    os.mkfifo(tmp_path / "raw-000100.jsonl")
    (tmp_path / "raw-000101.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 20 * 2**20))
    (tmp_path / "raw-000102.jsonl").write_text("[" * 100_000 + "\n" + '{"time_s":NaN}\n{"time_s":1e300}\n')
    (tmp_path / "raw-000103.jsonl").symlink_to("/dev/zero")
    (tmp_path / "raw-000104.jsonl").mkdir()
    assert list(read_tier(tmp_path, "raw")) == first
    assert list(replay(tmp_path)) == first
    tail = HistoryTail(tmp_path)
    assert tail.past() == first
    assert tail.more() == []
