"""The channel: whole records whatever happens to the writer, at any byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.measure import PHASES
from flatout.monitor.job.channel import (
    SCALARS,
    SLOT_BYTES,
    find_channel,
    read_channel,
)
from flatout.monitor.job.reporter import ChannelWriter

NAN = float("nan")
UNKNOWN = [NAN] * len(PHASES)


def scalars(**known: float) -> list[float]:
    return [known.get(name, NAN) for name in SCALARS]


def write(writer: ChannelWriter, steps: int) -> None:
    writer.write(scalars(time_s=float(steps), steps=steps), [float(steps)] * len(PHASES), UNKNOWN)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "job.channel"
    writer = ChannelWriter(path)
    assert read_channel(path) is None
    writer.write(
        scalars(time_s=12.5, steps=3, samples=96, loss=0.5, sees_data=1.0, allocated_bytes=2.0**40),
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        [0.5] * len(PHASES),
        b"19754993-bb37-74c5-28e6-909b2c7e2234",
    )
    found = read_channel(path)
    assert found is not None
    assert (found.time_s, found.steps, found.samples, found.loss) == (12.5, 3, 96, 0.5)
    assert (found.learning_rate, found.reserved_bytes) == (None, None)
    assert (found.allocated_bytes, found.sees_data, found.ended) == (2**40, True, False)
    assert found.host_s == dict(zip(PHASES, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], strict=True))
    assert found.device_s == dict.fromkeys(PHASES, 0.5)
    assert found.gpu_uuid == "19754993-bb37-74c5-28e6-909b2c7e2234"


def test_the_latest_record_is_read_and_the_file_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "job.channel"
    writer = ChannelWriter(path)
    for steps in range(1, 50):
        write(writer, steps)
        found = read_channel(path)
        assert found is not None
        assert (found.steps, found.device_s, found.gpu_uuid) == (steps, None, None)
    assert path.stat().st_size <= 2 * SLOT_BYTES


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, SLOT_BYTES), junk=st.binary(min_size=1, max_size=SLOT_BYTES))
def test_a_record_that_was_cut_leaves_the_one_before(tmp_path: Path, cut: int, junk: bytes) -> None:
    path = tmp_path / "job.channel"
    path.unlink(missing_ok=True)
    writer = ChannelWriter(path)
    for steps in (1, 2, 3):
        write(writer, steps)
    before = path.read_bytes()
    write(writer, 4)
    after = path.read_bytes()
    offset = 0  # the fourth record lies in the first slot
    torn = bytearray(before)
    torn[offset : offset + cut] = after[offset : offset + cut]
    path.write_bytes(torn)
    found = read_channel(path)
    assert found is not None
    assert found.steps in (3, 4)
    torn[offset : offset + len(junk)] = junk
    path.write_bytes(torn)
    found = read_channel(path)
    assert found is not None
    assert found.steps == 3 or bytes(torn) == after


@given(junk=st.binary(max_size=3 * SLOT_BYTES))
def test_what_is_no_channel_is_none(junk: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("junk") / "job.channel"
    path.write_bytes(junk)
    assert read_channel(path) is None


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_channel(tmp_path / "none.channel") is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_closes_the_channel_and_not_the_job() -> None:
    writer = ChannelWriter(Path("/dev/full"))
    write(writer, 1)
    assert writer.error is not None
    assert "No space left" in writer.error
    write(writer, 2)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists open files so")
def test_the_channel_of_another_process_is_found_by_its_number(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from flatout.monitor.job.reporter import ChannelWriter\n"
        "writer = ChannelWriter(pathlib.Path(sys.argv[1]))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    path = tmp_path / "job.channel"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert find_channel(child.pid) == path
        child.communicate("\n")
    assert find_channel(child.pid) is None
