"""The live line: unknown is n/a, a terminal is rewritten, tqdm's bars stay whole, a log gets plain lines."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import termios

import pytest
from rich.console import Console
from rich.progress import Progress

from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample
from flatout.monitor.terminal.live_line import LineWriter, live_line
from flatout.monitor.terminal.standing_line import CLEAR_LINE
from tests.support.screen import Screen

GIB = 2**30
HOST = HostSample(cpu_share=0.45, memory_used_bytes=67, memory_total_bytes=100)
T4 = GpuSample(index=0, utilisation_share=0.85, memory_used_bytes=int(8.2 * GIB), memory_total_bytes=16 * GIB)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def sample(second: float = 1.0, **fields: object) -> Sample:
    return Sample(time_s=second, span_s=1.0, host=HOST, **fields)  # type: ignore[arg-type]


def test_the_line_of_the_seed() -> None:
    job = JobSample(pid=1, loss=0.3245, learning_rate=5.23e-05, steps_per_s=12.3)
    assert live_line([sample(gpus=(T4,), job=job)]) == (
        "GPU 8.2/16.0 GiB (51 %) | util 85 % | CPU 45 % | RAM 67 % | loss 0.3245 | lr 5.2e-05 | 12.3 it/s"
    )


def test_unknown_is_never_zero() -> None:
    gpu = GpuSample(index=0)
    line = live_line([Sample(time_s=1.0, span_s=1.0, gpus=(gpu,))])
    assert line == "GPU n/a | util n/a | CPU n/a | RAM n/a"
    assert live_line([sample(gpus=(GpuSample(index=0, lost=True),))]) == "GPU lost | CPU 45 % | RAM 67 %"


def test_what_needs_two_readings_or_a_step_is_left_out_until_there_is_one() -> None:
    job = JobSample(pid=1)
    assert live_line([Sample(time_s=0.0, host=HostSample(), job=job)]) == "RAM n/a"
    assert live_line([sample(job=job)]) == "CPU 45 % | RAM 67 %"


def test_a_machine_without_a_gpu_shows_its_host() -> None:
    assert live_line([sample()]) == "CPU 45 % | RAM 67 %"


def test_several_gpus_show_the_jobs_own_or_all() -> None:
    two = (T4, GpuSample(index=1, memory_used_bytes=GIB, memory_total_bytes=16 * GIB, utilisation_share=0.0))
    assert live_line([sample(gpus=two, job=JobSample(pid=1, gpu_index=1))]).startswith("GPU 1.0/16.0")
    line = live_line([sample(gpus=two)])
    assert "GPU 0 8.2/16.0 GiB (51 %) | GPU 1 1.0/16.0 GiB (6 %)" in line


def test_long_steps_are_shown_as_seconds_and_the_last_known_rate_stands() -> None:
    slow = sample(1.0, job=JobSample(pid=1, steps_per_s=0.05))
    between = sample(2.0, job=JobSample(pid=1))
    assert live_line([slow, between]).endswith("20 s/it")


@pytest.mark.parametrize(("loss", "shown"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_a_loss_that_went_wrong_is_shown(loss: float, shown: str) -> None:
    assert f"LOSS IS {shown}" in live_line([sample(job=JobSample(pid=1, loss=loss))])


def test_a_log_gets_a_whole_line_a_minute() -> None:
    stream = io.StringIO()
    writer = LineWriter(stream)
    writer.write([Sample(time_s=0.0)])  # the first has no rates
    for second in range(1, 130):
        writer.write([sample(float(second))])
    writer.close()
    assert stream.getvalue() == "CPU 45 % | RAM 67 %\n" * 3


@pytest.mark.parametrize(
    ("first_step", "written"), [(7, ["67 % | 2 it/s"]), (100, ["67 %", "67 % | 2 it/s"])]
)
def test_a_log_begins_with_the_first_rate_of_the_job_or_after_a_minute(
    first_step: int, written: list[str]
) -> None:
    stream = io.StringIO()
    writer = LineWriter(stream)
    for second in range(121):
        rate = 2.0 if second >= first_step else None
        writer.write([sample(float(second), job=JobSample(pid=1, steps_per_s=rate))])
    lines = stream.getvalue().splitlines()
    assert [line.removeprefix("CPU 45 % | RAM ") for line in lines][: len(written)] == written


def test_nested_bars_come_and_go_over_an_open_line_and_none_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a job draws them: the line stands already, bars of epochs come and go, the line stays to the end."""
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    writer = LineWriter(stream)
    writer.write([sample(0.0, gpus=(T4,))])
    with tqdm.tqdm(range(2), file=stream, mininterval=0, ncols=60, desc="epochs") as epochs:
        for epoch in epochs:
            with tqdm.tqdm(range(3), file=stream, mininterval=0, ncols=60, desc=f"epoch {epoch}") as steps:
                for step in steps:
                    writer.write([sample(epoch + step / 10, gpus=(T4,))])
            tqdm.tqdm.write(f"epoch {epoch} done", file=stream)
    stream.write("finished\n")
    writer.write([sample(5.0, gpus=(T4,))])
    writer.close()
    stream.write("afterwards\n")
    rows = [row for row in Screen().feed(stream.getvalue()) if row]
    starts = [row[:12] for row in rows]
    assert starts == [
        "epoch 0: 100",
        "epoch 0 done",
        "epoch 1: 100",
        "epoch 1 done",
        "epochs: 100%",
        "finished",
        "GPU 8.2/16.0",
        "afterwards",
    ]
    assert len(rows[-2]) <= 27  # a line that is too long would wrap, and tqdm would miscount


def test_the_line_fits_the_terminal_that_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    user, program = os.openpty()
    try:
        fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 16, 0, 0))
        with os.fdopen(program, "w") as stream:
            writer = LineWriter(stream)
            writer.write([sample(gpus=(T4,))])
            writer.close()
            shown = b""
            while not shown.endswith(b"\n"):
                shown += os.read(user, 1000)
            assert shown.decode() == f"{CLEAR_LINE}GPU 8.2/16.0   \r\n"
    finally:
        os.close(user)


@pytest.mark.parametrize("has_bar", [False, True])
def test_a_sentence_stands_above_the_line(has_bar: bool) -> None:
    tqdm = pytest.importorskip("tqdm")
    stream = Terminal()
    writer = LineWriter(stream)
    with tqdm.tqdm(total=4, file=stream, ncols=60, desc="train", disable=not has_bar):
        writer.write([sample(1.0)])
        writer.say("flatout: a listener failed")
        writer.write([sample(2.0)])
        rows = [row for row in Screen().feed(stream.getvalue()) if row]
    writer.close()
    assert rows[0] == "flatout: a listener failed"
    assert rows[-1] == "CPU 45 % | RAM 67 %"
    assert len(rows) == 2 + has_bar


def test_a_stderr_that_is_gone_or_knows_little_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tee:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None: ...

    closed, tee = io.StringIO(), Tee()
    closed.close()
    for stream in (None, closed, tee):
        monkeypatch.setattr("sys.stderr", stream)
        writer = LineWriter()
        writer.write([sample()])
        writer.close()
    assert tee.text == "CPU 45 % | RAM 67 %\n"


def test_a_terminal_is_rewritten_in_place_and_left_at_a_fresh_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    writer = LineWriter(stream)
    for second in (1.0, 2.0):
        writer.write([sample(second, gpus=(T4,))])
    writer.close()
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert all(len(part.rstrip("\n")) < 20 for part in text.split(CLEAR_LINE))


def test_a_bar_of_tqdm_stays_whole_beside_the_line() -> None:
    tqdm = pytest.importorskip("tqdm")
    stream = Terminal()
    writer = LineWriter(stream)
    with tqdm.tqdm(total=4, file=stream, mininterval=0, ncols=60, desc="train") as bar:
        for second in range(4):
            bar.update()
            writer.write([sample(float(second))])
    writer.close()
    rows = Screen().feed(stream.getvalue())
    bars = [row for row in rows if "train" in row]
    assert len(bars) == 1  # a bar that was broken leaves its pieces on several rows
    assert re.fullmatch(r"train: 100%\|[█#]+\| 4/4 \[.*\]", bars[0])
    assert not any("RAM" in row for row in bars)


def test_what_the_job_prints_stands_above_the_line_and_is_not_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    writer = LineWriter(stream)
    writer.write([sample(1.0)])
    print("epoch 0", 0.25)
    writer.write([sample(2.0)])
    print("loading", end="", flush=True)
    writer.write([sample(3.0)])  # would erase what the job has begun
    assert Screen().feed(stream.getvalue())[-1] == "loading"
    print(" done")
    writer.write([sample(4.0)])
    assert Screen().feed(stream.getvalue()) == ["epoch 0 0.25", "loading done", "CPU 45 % | RAM 67 %"]
    writer.close()
    print("afterwards")
    assert Screen().feed(stream.getvalue())[-2] == "afterwards"


def test_above_the_bars_of_rich_the_line_is_a_plain_one_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich prints whatever comes to stderr as whole lines above its bars: none of them could be rewritten."""
    terminal = Terminal()
    for name in ("sys.stdout", "sys.stderr"):
        monkeypatch.setattr(name, terminal)
    writer = LineWriter()
    writer.write([sample(0.0)])
    with Progress(console=Console(file=terminal, force_terminal=True, width=60)) as progress:
        task = progress.add_task("train", total=10)
        for second in range(10):
            writer.write([sample(float(second))])
            progress.advance(task)
            progress.refresh()
    writer.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zBCDE-IL-Z]", "", terminal.getvalue())
    rows = [row for row in Screen().feed(shown) if row]
    assert [row.split()[0] for row in rows] == ["CPU", "train"]
