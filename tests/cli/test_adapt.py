"""`flatout adapt train` in processes of its own: interrupted, killed, and two together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatout.engines.adapters import verbs
from flatout.engines.adapters.training.records import BEST, KIND, PHASES, TRAINING, checkpoints_of
from flatout.engines.run.log import read_log
from tests.support.adapters import save_tiny, tiny_settings
from tests.support.warm_python import warm

# Sums of more threads round in another order: the runs that are compared have one each.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    verbs.adapt(tiny_settings(model, out))
    torch.set_num_threads(threads)
    return out


def weights(out: Path, phase: str, name: str = TRAINING) -> dict[str, Any]:
    found = checkpoints_of(out, phase).latest()
    assert found is not None and found.state.finished
    return load_file(found.path / f"{name}.safetensors")


def config_file(model: Path, out: Path) -> Path:
    path = out.with_suffix(".yaml")
    path.write_text(json.dumps(tiny_settings(model, out)))  # JSON is YAML
    return path


def started(*arguments: object, program: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [*(program or [str(warm().bin / "flatout")]), "adapt", "train", *map(str, arguments)]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the run ended without {text!r}")


def test_an_interrupt_ends_with_one_line_and_a_checkpoint_and_a_kill_with_the_last_one(
    model: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    config = config_file(model, out)
    process = started(config)
    wait_for_line(process, "phase1 2/6")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert stdout == ""
    ending = stderr.splitlines()[-1]
    assert ending.startswith("flatout: interrupted; step ") and ending.endswith("; continue with --resume")
    process = started(config, "--resume", program=[sys.executable, "-m", "flatout"])  # SIGSTOP stops it
    wait_for_line(process, "phase3 2/4")
    os.kill(process.pid, signal.SIGSTOP)
    assert verbs.adapt_status(out).phases[2].state == "going on"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [phase.state for phase in verbs.adapt_status(out).phases] == [
        "finished",
        "finished",
        "interrupted",
    ]
    done = started(out, "--resume", "--json")
    stdout, stderr = done.communicate()
    assert done.returncode == 0, stderr
    assert json.loads(stdout)["format"] == "flatout-adapters"
    assert "phase1 is finished at step 6: it is not trained again" in stderr
    for phase in PHASES:
        left, right = weights(out, phase), weights(whole, phase)
        assert all(left[name].equal(right[name]) for name in right), phase


ACCELERATE = (
    "accelerate.commands.accelerate_cli launch --multi_gpu --num_processes 2 --num_machines 1"
    " --mixed_precision no --dynamo_backend no"
)


@pytest.mark.parametrize("launcher", ["two nodes", "accelerate"])
def test_two_processes_arrive_where_one_does(launcher: str, model: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flatout = warm().bin / "flatout"  # --no_python: it is a program
    train = ["--no_python", flatout, "adapt", "train", config_file(model, out)]
    if launcher == "accelerate":
        done = [warm().run("python", "-m", *ACCELERATE.split(), *train)]
    else:
        done = warm().run_agents(*train)
    assert not any(each.returncode for each in done), done
    assert sum(each.stdout.count("phase3  step 4 of 4, finished") for each in done) == 1
    assert sum(each.stderr.count("phase1 6/6") for each in done) == 1
    for phase in PHASES:
        for name in (TRAINING, BEST):
            left, right = weights(out, phase, name), weights(whole, phase, name)
            assert left.keys() == right.keys()
            assert all(left[key].equal(right[key]) for key in right), phase
    assert read_log(out, KIND)[0].sent_bytes, "gradients travel"
