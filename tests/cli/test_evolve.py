"""`flatout evolve` in processes of its own: interrupted, killed, and as several ranks."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from flatout.engines.evolution.training.trainer import evolve
from tests.support.evolution import save_tiny, tiny_settings
from tests.support.warm_python import warm

# Sums of more threads round in another order: the runs that are compared have one each.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
EPOCHS = 6


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, Any]:
    """What one process that nothing disturbs arrives at."""
    out = tmp_path_factory.mktemp("whole") / "run"
    evolve(settings(model, out))
    return last(out)


def settings(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return tiny_settings(model, out, epochs=EPOCHS, optimizer="adamw", lr=0.02, checkpoint_every=1, **changes)


def last(out: Path) -> dict[str, Any]:
    return load_file(out / "checkpoints" / f"epoch-{EPOCHS:06d}" / "tensors.safetensors")


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def config_file(model: Path, out: Path, **changes: Any) -> Path:
    path = out.with_suffix(".yaml")
    path.write_text(json.dumps(settings(model, out, **changes)))  # JSON is YAML
    return path


def started(*arguments: object) -> subprocess.Popen[str]:
    command = [warm().bin / "flatout", "evolve", *map(str, arguments)]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the run ended without {text!r}")


def test_a_run_that_is_killed_is_resumed_bit_for_bit(
    model: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    config = config_file(model, out)
    process = started(config)
    wait_for_line(process, "epoch 3 ")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "checkpoints" / f"epoch-{EPOCHS:06d}").exists()
    evolve({"out": str(out)}, resume=True)
    assert same(last(out), whole)


def test_an_interrupt_ends_with_one_line_and_a_checkpoint(
    model: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    config = config_file(model, out)
    process = started(config)
    wait_for_line(process, "epoch 2 ")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert stdout == ""
    ending = stderr.splitlines()[-1]
    assert ending.startswith("flatout: interrupted; ") and ending.endswith("; continue with --resume")
    evolve({"out": str(out)}, resume=True)
    assert same(last(out), whole)


def torchrun(num_ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    return warm().run("torchrun", "--standalone", "--nproc_per_node", str(num_ranks), *arguments)


# The command, which notes who writes which checkpoint.
NOTING = """
import os, pathlib
from flatout.cli.app import main
from flatout.engines.run.checkpoints import Checkpoints

save = Checkpoints.save

def noting(self, number, **options):
    with pathlib.Path(__file__).with_name("saves").open("a") as file:
        print(os.environ["RANK"], number, file=file)
    return save(self, number, **options)

Checkpoints.save = noting
main()
"""


def test_two_nodes_arrive_where_one_process_does(
    model: Path,
    whole: dict[str, Any],
    tmp_path: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(repository / "docs"))
    figures = importlib.import_module("scale_figures")
    out, script = tmp_path / "run", tmp_path / "noting.py"
    script.write_text(NOTING)
    nodes = warm().run_agents(script, "evolve", config_file(model, out), "--json")
    assert [node.returncode for node in nodes] == [0, 0], nodes
    assert same(last(out), whole)
    (said,) = [node.stdout for node in nodes if node.stdout]
    assert sum(node.stderr.count("epoch 6 ") for node in nodes) == 1
    # Nothing but rewards travels, of 16 members and 4 prompts: as much as docs/scale.md extrapolates from.
    assert json.loads(said)["sent_bytes"] == {"rewards": EPOCHS * figures.reward_bytes(16, 4, ranks=2)}
    assert not list(out.glob(".*"))
    written = (tmp_path / "saves").read_text().splitlines()
    assert written == [f"0 {epoch}" for epoch in range(1, EPOCHS + 1)]  # once, by the first process


def test_two_tasks_of_srun_arrive_where_one_process_does(
    model: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    """What srun tells its tasks, without srun: nothing else says who they are and where they meet."""
    out = tmp_path / "run"
    config = config_file(model, out)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    job |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0", "MASTER_PORT": str(port)}
    tasks = [
        subprocess.Popen(
            [warm().bin / "flatout", "evolve", str(config), "--json"],
            env={**ENVIRONMENT, **job, "SLURM_PROCID": number, "SLURM_NODEID": number},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in "01"
    ]
    said = [task.communicate() for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert same(last(out), whole)
    assert set(json.loads(said[0][0])["sent_bytes"]) == {"rewards"}


KILLED_ONCE = """
import json, os, signal, sys
from flatout.engines.evolution.training import trainer

tell = trainer.Eggroll.tell

def dying(self, *arguments, **options):
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and self.epoch == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return tell(self, *arguments, **options)

trainer.Eggroll.tell = dying
trainer.evolve(json.load(open(sys.argv[1])))
"""


def test_a_killed_rank_is_started_again_and_the_run_goes_on(
    model: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    out, script = tmp_path / "run", tmp_path / "killed_once.py"
    script.write_text(KILLED_ONCE)
    done = torchrun(2, "--max-restarts", "1", script, config_file(model, out))
    assert done.returncode == 0, done.stderr
    assert any(said in done.stderr for said in ("SIGKILL", "-9", "another rank is gone")), done.stderr
    assert same(last(out), whole)
