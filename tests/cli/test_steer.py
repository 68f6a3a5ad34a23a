"""`flatout steer search` in processes of its own: two workers, an interrupt, and going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.steering import tiny_search, write_tiny
from tests.support.warm_python import warm

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("steering"))


def config_file(tiny: Path, out: Path, **changes: Any) -> Path:
    config = out.with_suffix(".yaml")
    config.write_text(json.dumps(tiny_search(tiny, out, **changes)))  # JSON is YAML
    return config


def test_an_interrupt_ends_all_workers_and_the_same_command_goes_on(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    # So many trials that it cannot have ended before the second worker has joined.
    config = config_file(tiny, out, trials=100_000, workers=2, rungs=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "flatout", "steer", "search", str(config), "--json"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "1 has joined the study" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert "interrupted; every finished row is kept" in stderr.splitlines()[-1], stderr
    assert psutil.wait_procs(children, timeout=60)[1] == []
    kept = sum(len(path.read_text().splitlines()) for path in (out / "rows").glob("*.jsonl"))
    assert kept > 0
    config_file(tiny, out, trials=1, rungs=1, workers=1)
    again = warm().run("flatout", "steer", "search", config, "--json")
    assert again.returncode == 0, again.stderr
    document = json.loads(again.stdout)
    states = {trial["state"] for trial in document["trials"]}
    assert states == {"complete"}
    assert document["retest"]["num_questions"] == 20
