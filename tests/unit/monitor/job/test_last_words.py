"""What is kept of scripts that signals, crashes and `os._exit` end, and of the children they fork."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from flatout.ground.runs import HEARD, LAST_WORDS, UNHEARD, list_runs, show_state
from flatout.ground.script.main import start_command
from flatout.monitor.job.last_words import LastWords
from flatout.monitor.job.run_script import MODULE
from flatout.monitor.sinks.choice import SinkChoice

KILL = "import os, signal; os.kill(os.getpid(), signal.{})"


def run(folder: Path, source: str) -> int:
    """Run a script under watch, and return how its process ended."""
    (folder / "script.py").write_text(source)
    options = {"module": False, "name": None, "hz": 1.0, "folder": str(folder / "runs")}
    command = start_command(
        MODULE, json.dumps({"command": ["script.py"], "sinks": asdict(SinkChoice()), **options})
    )
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False).returncode


@pytest.mark.parametrize(
    ("source", "shown", "code"),
    [
        (KILL.format("SIGTERM"), "died: SIGTERM", -signal.SIGTERM),
        (KILL.format("SIGHUP"), "died: SIGHUP", -signal.SIGHUP),
        ("import ctypes; ctypes.string_at(0)", "died: Segmentation fault", -signal.SIGSEGV),
        ("import os; os.abort()", "died: Aborted", -signal.SIGABRT),
        (KILL.format("SIGKILL"), f"died: {UNHEARD}", -signal.SIGKILL),
        ("import os; os._exit(4)", "failed: exit code 4", 4),
        ("import os; os._exit(0)", "finished", 0),
    ],
)
def test_what_ended_a_script_is_kept_and_its_end_is_its_own(
    tmp_path: Path, source: str, shown: str, code: int
) -> None:
    assert run(tmp_path, source) == code
    ((_, kept),) = list_runs(tmp_path / "runs")
    assert show_state(kept) == shown


def test_what_ends_a_child_does_not_end_the_run(tmp_path: Path) -> None:
    source = """
import os, signal
for end in (lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: os._exit(3)):
    child = os.fork()
    if not child:
        end()
    os.waitpid(child, 0)
os.kill(os.getpid(), signal.SIGHUP)
"""
    assert run(tmp_path, source) == -signal.SIGHUP
    ((folder, kept),) = list_runs(tmp_path / "runs")
    assert show_state(kept) == "died: SIGHUP"
    assert not (folder / f"SIGTERM{LAST_WORDS}").read_bytes()


def test_a_script_that_hears_a_signal_itself_goes_on_hearing_it(tmp_path: Path) -> None:
    source = (
        "import os, signal, sys\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    assert run(tmp_path, source) == 5
    ((_, kept),) = list_runs(tmp_path / "runs")
    assert show_state(kept) == "failed: exit code 5"


def test_an_end_leaves_no_files_and_hears_nothing_more(tmp_path: Path) -> None:
    own = os._exit
    words = LastWords(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1 + len(HEARD)
    words.close()
    assert not list(tmp_path.iterdir())
    assert os._exit is own
    assert not any(faulthandler.unregister(signal.Signals[name]) for name in HEARD)
