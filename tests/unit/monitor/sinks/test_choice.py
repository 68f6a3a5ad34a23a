"""Sinks by choice: each opens, hears, and is closed; none is imported that was not asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.ground.codec import decode, encode
from flatout.ground.errors import BadInput
from flatout.monitor.sample import Sample
from flatout.monitor.sinks.choice import SinkChoice, open_sinks
from tests.support.monitor import story


def test_every_sink_hears_the_samples(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    choice = SinkChoice(
        jsonl=str(tmp_path / "a" / "s.jsonl"),
        csv=str(tmp_path / "b" / "s.csv"),
        tensorboard=str(tmp_path / "tb"),
        prometheus=0,
    )
    notes: list[str] = []
    with open_sinks(choice, on_progress=notes.append) as sinks:
        assert len(sinks) == 4
        for sample in story(seconds=3):
            for sink in sinks:
                sink(sample)
    assert len((tmp_path / "a" / "s.jsonl").read_text().splitlines()) == 3
    assert len((tmp_path / "b" / "s.csv").read_text().splitlines()) == 4
    assert list((tmp_path / "tb").iterdir())
    assert len(notes) == 1 and notes[0].startswith("metrics are at http://127.0.0.1:")


def test_nothing_chosen_is_nothing_opened() -> None:
    with open_sinks(SinkChoice()) as sinks:
        assert sinks == ()


def test_a_choice_travels_as_json() -> None:
    choice = SinkChoice(csv="s.csv", prometheus=9)
    assert decode(SinkChoice, json.loads(json.dumps(encode(choice)))) == choice


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"), open_sinks(SinkChoice(csv=str(tmp_path))):
        raise AssertionError("it must not open")


def test_a_forked_child_leaves_the_sinks_to_its_parent() -> None:
    """Its endpoint has no thread there that could answer that it has ended."""
    code = (
        "import os, sys\n"
        "from flatout.monitor.sinks.choice import SinkChoice, open_sinks\n"
        "with open_sinks(SinkChoice(prometheus=0)):\n"
        "    child = os.fork()\n"
        "if child: print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "else: sys.exit(3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "3\n", done.stderr


def test_a_disk_that_is_full_at_the_end_is_no_error(tmp_path: Path) -> None:
    with open_sinks(SinkChoice(jsonl="/dev/full")) as (sink,), pytest.raises(OSError, match="No space left"):
        sink(Sample(time_s=1.0))


def test_only_what_is_wanted_is_imported() -> None:
    code = (
        "import sys\n"
        "from flatout.monitor.sinks.choice import SinkChoice, open_sinks\n"
        "with open_sinks(SinkChoice()): print({'http.server', 'tensorboard', 'torch'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
