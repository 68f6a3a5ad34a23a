"""A script under `flatout diagnose`, `watch --run` and `run` sees what it sees under `python`.

One probe writes down what it can see and ends in several ways; what differs is listed here, and in
docs/diagnosis.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.measure.arms.knock_out import leave_out
from tests.support.cli import ENVIRONMENT, SCRIPTS

WAYS = {
    "python": (),
    "diagnose": ("-m", "flatout", "diagnose", "--save", "{folder}/evidence.json"),
    "watch": ("-m", "flatout", "watch", "--log", "{folder}/log", "--run"),
    "run": ("-m", "flatout", "run", "--with", "{folder}/flatout.toml"),
}
INHERITED = 97  # a file that is open already; seen.py knows its number
# What is allowed to differ, and how.
DIFFERENT: dict[str, dict[str, Any]] = {
    "python": {},
    "diagnose": {
        "os.environ": {"FLATOUT_JOB"},
        "signals": {str(int(signal.SIGRTMAX))},
        "names of __main__": {leave_out.SWITCH},
    },
    "watch": {"threads": {"flatout-sampler"}},
    "run": {},
}
# Exit codes by way: `diagnose` ends with 2 where there is nothing to measure, as its documentation says.
CODES = {"exit": (1, 2, 1, 1), "raise": (1, 2, 1, 1), "kill": (-9, 2, -9, -9)}


def start(way: str, *command: str, folder: Path, options: tuple[str, ...] = (), **pipes: Any) -> Any:
    started = [sys.executable, *options, *(word.format(folder=folder) for word in WAYS[way]), *command]
    (folder / "flatout.toml").write_text('command = ["seen.py"]\ntreatments = []\n')
    reader, writer = os.pipe()
    os.write(writer, b"inherited")
    os.close(writer)
    os.dup2(reader, INHERITED)  # as a shell does for `train.py <(zcat data.gz)`
    try:
        process = subprocess.Popen(
            started,
            cwd=SCRIPTS,
            env={**ENVIRONMENT, "FLATOUT_HOME": str(folder)},
            close_fds=False,
            text=True,
            **pipes,
        )
    finally:
        for number in {reader, INHERITED}:  # they may be one, where that was the next free number
            os.close(number)
    return process


def run(way: str, *command: str, folder: Path, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = start(way, *command, folder=folder, options=options, **pipes)
    out, err = process.communicate("typed\n", timeout=120)
    own = "".join(line for line in err.splitlines(keepends=True) if not line.startswith("flatout: "))
    return process.returncode, out, own


def in_terminal(way: str, *command: str, folder: Path) -> None:
    ours, theirs = os.openpty()
    process = start(way, *command, folder=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"typed\n")
    try:
        while os.read(ours, 4096):
            pass
    except OSError:  # the last process that had the terminal is gone
        process.wait()
    os.close(ours)


def without_allowed(seen: dict[str, Any], way: str) -> dict[str, Any]:
    """What was seen, without what this way may add."""
    for name, added in DIFFERENT[way].items():
        value = seen[name]
        assert added <= set(value), f"{name}: {added} was not seen"
        if isinstance(value, dict):
            seen[name] = {key: each for key, each in value.items() if key not in added}
        else:
            seen[name] = [each for each in value if each not in added]
    return seen


@pytest.mark.parametrize("how", ["script", "module", "terminal"])
def test_what_it_sees_of_its_process(how: str, tmp_path: Path) -> None:
    seen, ended = {}, {}
    for way in WAYS:
        path = tmp_path / "seen.json"
        if how == "terminal":
            in_terminal(way, "seen.py", "return", str(path), folder=tmp_path)
        else:
            command = ("-m", "seen") if how == "module" else ("../scripts/seen.py",)
            options = ("-O", "-W", "always:look", "-X", "dev") if how == "module" else ()
            ended[way] = run(way, *command, "return", str(path), folder=tmp_path, options=options)[1:]
        seen[way] = without_allowed(json.loads(path.read_text()), way)
        path.unlink()
    assert len(seen["python"]) > 35
    for way in WAYS:
        assert seen[way] == seen["python"]
        assert ended.get(way) == ended.get("python")  # output, warnings, and what runs at exit
    if ended:
        assert ended["python"][0].splitlines()[1:] == ["registered last", "registered first"]
        assert ended["python"][1].count("Warning") >= 2


@pytest.mark.parametrize("how", ["exit", "raise", "kill"])
def test_how_it_ends(how: str, tmp_path: Path) -> None:
    """The exit code, and the script's own words: with a hook of its own, and no frame of ours."""
    ended = {way: run(way, "seen.py", how, folder=tmp_path) for way in WAYS}
    assert tuple(code for code, _, _ in ended.values()) == CODES[how]
    assert len({out for _, out, _ in ended.values()}) == 1
    assert len({err for _, _, err in ended.values()}) == 1
    assert "my hook:" in ended["python"][2] or how != "raise"


@pytest.mark.parametrize("way", WAYS)
def test_its_signal_handlers_are_called(way: str, tmp_path: Path) -> None:
    process = start(way, "seen.py", "wait", folder=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "SIGUSR1\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert out == "SIGTERM\n", err
    assert process.returncode == (130 if way == "diagnose" else 0), err
