"""`flatout watch` as a user meets it: in a real terminal, in a pipe, around a script, beside a process."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.ground.runs import list_runs
from tests.support.monitor import kept_run, story
from tests.support.screen import Screen

FLATOUT = [sys.executable, "-m", "flatout", "watch"]
PATIENCE_S = 60.0
LEAVE = b"\x1b[?1049l"
# Ctrl-C and Ctrl-Z are signals of a terminal to the processes that it controls.
OWN_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A terminal of our own with a program in it."""

    def __init__(self, folder: Path, *arguments: str, columns: int = 60, rows: int = 24) -> None:
        self.seen = b""
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "OMP_NUM_THREADS": "1",
            "FLATOUT_RUNS": str(folder / "runs"),
        }
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.user, self.program = pty.openpty()
        fcntl.ioctl(self.program, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_THE_TERMINAL, *FLATOUT, *arguments],
            cwd=folder,
            env=environment,
            stdin=self.program,
            stdout=self.program,
            stderr=self.program,
            start_new_session=True,
        )

    def until(self, words: bytes) -> bytes:
        """All that came up to the words; they must come."""
        deadline_s = time.monotonic() + PATIENCE_S
        while words not in self.seen:
            ready, _, _ = select.select([self.user], [], [], max(deadline_s - time.monotonic(), 0))
            assert ready, (words, self.seen[-2000:])
            self.seen += os.read(self.user, 65536)
        before, _, self.seen = self.seen.partition(words)
        return before + words

    def type(self, keys: bytes) -> None:
        os.write(self.user, keys)

    def end(self) -> int:
        """The exit code, with everything that was still to be read."""
        while self.process.poll() is None:
            ready, _, _ = select.select([self.user], [], [], 0.05)
            if ready:
                self.seen += os.read(self.user, 65536)
        return self.process.returncode

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.program)[3] & termios.ECHO)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.user)
        os.close(self.program)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_the_view_obeys_keys_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    terminal = Terminal(tmp_path, "--hz", "10")
    terminals.append(terminal)
    picture = terminal.until(b"q quit")
    assert not terminal.echoes
    terminal.type(b"s")
    terminal.until(b"sort: RAM" if b"no GPU" in picture else b"sort: SM")
    terminal.type(b"?")
    terminal.until(b"sort processes by the next column")
    terminal.type(b"?")
    terminal.until(b"q quit")
    terminal.type(b"q")
    terminal.until(LEAVE)
    assert terminal.end() == 0
    assert terminal.echoes


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_the_terminal_as_it_was(
    tmp_path: Path, terminals: list[Terminal], number: int, code: int
) -> None:
    terminal = Terminal(tmp_path, "--hz", "10")
    terminals.append(terminal)
    terminal.until(b"q quit")
    terminal.process.send_signal(number)
    terminal.until(LEAVE)
    assert terminal.end() == code
    assert terminal.echoes


def test_ctrl_c_and_ctrl_z(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, "--hz", "10")
    terminals.append(terminal)
    terminal.until(b"q quit")
    terminal.type(b"\x1a")
    terminal.until(LEAVE)
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and terminal.echoes
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until(b"q quit")
    terminal.type(b"\x03")
    terminal.until(LEAVE)
    assert terminal.end() == 130
    assert terminal.echoes


def test_a_replay_fills_the_screen_and_waits_at_its_end(tmp_path: Path, terminals: list[Terminal]) -> None:
    kept_run(tmp_path / "runs", story(seconds=30, wait=0.5))
    terminal = Terminal(tmp_path, "--replay", "train", "--speed", "1e9", columns=100, rows=40)
    terminals.append(terminal)
    terminal.until(b"The loader is too slow")
    terminal.until(b"q quit")
    assert terminal.process.poll() is None
    terminal.type(b"q")
    assert terminal.end() == 0


TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
data = DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=4)
print("training", sys.argv[1:], flush=True)
try:
    for epoch in range(10**9 if "forever" in sys.argv else 3):
        for x, in data:
            model(x).sum().backward()
            optimizer.step()
except KeyboardInterrupt:
    print("stopped by hand", flush=True)
    sys.exit(5)
sys.exit(3)
"""


def test_a_script_has_the_terminal_to_itself_but_for_the_line(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    """Its output is there, Ctrl-C is its own, its exit code is passed on, and a run is kept."""
    (tmp_path / "train.py").write_text(TRAIN)
    terminal = Terminal(tmp_path, "--hz", "10", "--run", "train.py", "forever", "--lr", "1", columns=120)
    terminals.append(terminal)
    terminal.until(b"training ['forever', '--lr', '1']")
    terminal.until(b" it/s")
    terminal.type(b"\x03")
    terminal.until(b"stopped by hand")
    assert terminal.end() == 5
    assert b"flatout report" in terminal.seen
    ((_, run),) = list_runs(tmp_path / "runs")
    assert run.ended_s is not None and run.name == "train"


ASKS = """
from tqdm import tqdm

print("hello", input("Your name? "))
breakpoint()
for epoch in range(2):
    for _ in tqdm(range(3), desc="train", ncols=40, mininterval=0):
        tqdm.write("within")
    tqdm.write(f"epoch {epoch} done")
print("end")
"""


def test_what_is_asked_and_typed_stays_and_bars_leave_nothing(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    """In a real terminal: samples come while `input` and the debugger wait, and erase nothing."""
    (tmp_path / "asks.py").write_text(ASKS)
    options = ("--hz", "10", "--jsonl", "samples.jsonl", "--run")
    terminal = Terminal(tmp_path, *options, "asks.py", columns=100)
    terminals.append(terminal)
    screen = Screen()
    samples = tmp_path / "samples.jsonl"

    def shown(words: bytes) -> str:
        """The last row, after the words and five more samples."""
        screen.feed(terminal.until(words).decode())
        seen = len(samples.read_bytes().splitlines()) if samples.exists() else 0
        deadline_s = time.monotonic() + PATIENCE_S
        while len(samples.read_bytes().splitlines() if samples.exists() else ()) < seen + 5:
            assert time.monotonic() < deadline_s
            select.select([terminal.user], [], [], 0.02)
        while select.select([terminal.user], [], [], 0)[0]:
            terminal.seen += os.read(terminal.user, 65536)
        screen.feed(terminal.seen.decode())
        terminal.seen = b""
        return [row for row in screen.rows if row.strip()][-1].rstrip()

    assert shown(b"Your name? ") == "Your name?"
    terminal.type(b"Ad")
    assert shown(b"Ad") == "Your name? Ad"
    terminal.type(b"a\r")
    assert shown(b"(Pdb) ").startswith("(Pdb)")
    terminal.type(b"p 6 *")
    assert shown(b"p 6 *") == "(Pdb) p 6 *"
    terminal.type(b" 7\rc\r")
    assert terminal.end() == 0
    rows = [row for row in screen.feed(terminal.seen.decode()) if row]
    rows = rows[rows.index("42") :]
    bars = ["within"] * 3 + ["train: 100%"]
    kept = [row.partition("|")[0] if row.startswith("train") else row for row in rows if "CPU" not in row]
    assert kept[:-1] == ["42", "(Pdb) c", *bars, "epoch 0 done", *bars, "epoch 1 done", "end"]
    assert sum("CPU" in row for row in rows) <= 1  # the last line alone is left standing


def flatout(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FLATOUT, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FLATOUT_RUNS": str(folder / "runs")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_script_in_a_pipe_keeps_its_output_and_its_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = flatout(tmp_path, "--run", "--csv", "samples.csv", "train.py", "--epochs", "3")
    assert done.returncode == 3, done.stderr
    assert done.stdout == "training ['--epochs', '3']\n"
    assert (tmp_path / "samples.csv").read_text().startswith("time_s,host/cpu_share")


def test_a_process_is_attached_to_and_its_end_ends_the_lines(tmp_path: Path) -> None:
    """Beside a job that was started under watch, from another process, until that job is gone."""
    (tmp_path / "train.py").write_text(TRAIN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLATOUT_RUNS": str(tmp_path / "runs")}
    job = subprocess.Popen(
        [*FLATOUT, "--run", "train.py", "forever"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    beside = None
    try:
        assert job.stdout is not None and b"training" in job.stdout.readline()
        beside = subprocess.Popen(
            [*FLATOUT, "--hz", "10", "--json", "--pid", str(job.pid)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
        )
        assert beside.stdout is not None
        for line in beside.stdout:
            sample = json.loads(line)
            if sample["job"]["steps_per_s"]:
                break
        assert sample["job"]["pid"] == job.pid and sample["job"]["phases"]["wait"] >= 0
        another = subprocess.Popen(
            [*FLATOUT, "--pid", str(job.pid)], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
        )
        assert another.stdout is not None
        with another.stdout:
            another.stdout.readline()
            another.kill()  # whoever looks on may die: the job is not theirs
        another.wait()
        assert job.poll() is None
        job.kill()
        job.wait()
        assert json.loads(beside.stdout.readlines()[-1])["job"]["state"] == "died"
        assert beside.wait() == 0
    finally:
        for process in (job, beside):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


def test_a_pipe_gets_a_line_per_sample_and_a_reader_who_leaves_ends_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*FLATOUT, "--hz", "10"],
        cwd=tmp_path,
        env={**os.environ, "FLATOUT_RUNS": str(tmp_path / "runs")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    lines = [process.stdout.readline() for _ in range(4)]
    assert all(b"RAM" in line or b"no GPU" in line for line in lines)
    assert b"CPU" in lines[-1] and b"CPU n/a" not in b"".join(lines)
    assert not any(b"it/s" in line for line in lines)  # nobody reports steps
    process.stdout.close()
    assert process.wait(timeout=PATIENCE_S) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_every_test_that_the_page_names_is_there(repository: Path) -> None:
    page = (repository / "docs" / "watch.md").read_text(encoding="utf-8")
    table = page.partition("## What it must not do")[2].partition("\n## ")[0]
    named = re.findall(r"`(test_\w+)`", table)
    sources = "".join(path.read_text(encoding="utf-8") for path in (repository / "tests").rglob("test_*.py"))
    assert len(named) >= 30
    assert [name for name in named if f"def {name}(" not in sources] == []
