"""A script under watch and its page, as two real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.monitor_web import Listener

SCRIPT = """
import os, sys
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child", flush=True)
for _ in range(2):
    try:
        if sys.stdin.readline():
            break
    except KeyboardInterrupt:
        print("interrupted", flush=True)
sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "flatout", "watch", "--web", *request.param, "--hz", "10"]
    with subprocess.Popen(
        [*command, "--run", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "FLATOUT_RUNS": str(tmp_path / "runs")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


def address_in(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    line = next(line for line in process.stderr if "page" in line)
    assert "it ends with the script" in line, line
    return next(word for word in line.split() if word.startswith("http://"))


@pytest.mark.parametrize("script", [()], indirect=True)
def test_the_page_follows_the_script_and_ends_with_it(script: subprocess.Popen[str]) -> None:
    assert script.stdin is not None and script.stdout is not None and script.stderr is not None
    assert script.stdout.readline() == "no child\n"
    with Listener(address_in(script)) as listener:
        listener.until("ready")
        listener.until("history")  # ten samples a second, and a look at the log every second
        os.killpg(script.pid, signal.SIGINT)
        assert script.stdout.readline() == "interrupted\n"
        listener.until("history")
        script.stdin.write("\n")
        script.stdin.close()
        assert script.stdout.read() == ""
        assert "flatout report" in script.stderr.read()
        assert script.wait() == 3
        states = [
            run["state"] for event in listener.events() if event.name == "runs" for run in event.data["runs"]
        ]
    assert "running" not in states


@pytest.mark.parametrize("script", [("--port", "70000")], indirect=True)
def test_without_a_page_the_script_runs_all_the_same(script: subprocess.Popen[str]) -> None:
    assert script.stderr is not None and script.stdin is not None
    assert "no page: there is no port 70000" in next(line for line in script.stderr if "page" in line)
    script.stdin.write("\n")
    script.stdin.close()
    assert script.wait() == 3
