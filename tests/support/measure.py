"""Small jobs and ways to run them, for tests that need a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MARK = "FLATOUT_TEST_RUN"
# Blocks of few steps: they show what a job does, not how much faster an arm is.
BRIEF = {"MOST_STEPS_PER_BLOCK": 6, "MOST_ROUNDS": 3, "ENOUGH_REAL_STEPS": 40, "ENOUGH_LOOKS_S": 0.0}
# Rounds without end, for a job that a test ends: no arm is ever settled.
ENDLESS = {"MOST_ROUNDS": 1_000_000, "GAIN": 0, "NARROW": 0}


def with_schedule(constants: Mapping[str, float]) -> str:
    """Code that changes the schedule of a diagnosis in the process that runs it."""
    changed = ", ".join(f"{name}={value}" for name, value in constants.items())
    return f"from flatout.measure.run.step_blocks import schedule; vars(schedule).update({changed}); "


# A job as users write them; what a test is about is put in the middle or at the end.
PREAMBLE = """\
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 4))


def train_step(x, y):
    loss = (model(x) - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""
# The same without torch.optim, whose first optimizer takes as long to make as torch to import.
BY_HAND = """\
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(8, 4)
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 4))


def train_step(x, y):
    loss = (model(x) - y).pow(2).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    return loss
"""
FOREVER = """\
while True:
    for x, y in DataLoader(data, batch_size=16):
        train_step(x, y)
"""


def line_of(file: Path, marker: str) -> int:
    """The line of `file` that ends in the comment `# at: marker`."""
    lines = file.read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# at: {marker}")]
    return number


def write_script(path: Path, body: str, *, preamble: str = PREAMBLE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(preamble + textwrap.dedent(body), encoding="utf-8")
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """A finished command: what it said, and which of its processes outlived it."""

    code: int
    stdout: str
    stderr: str
    left: tuple[str, ...]

    @property
    def said(self) -> list[str]:
        """The lines flatout itself wrote to stderr, without the progress of the passes."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("flatout: ")]
        return [line for line in lines if not line.endswith(" s left")]

    def json(self) -> Any:
        return json.loads(self.stdout)


def run(
    command: list[str], *, folder: Path, during: Callable[[Any], None] | None = None, **popen: Any
) -> Ran:
    """Run a command to its end; `during` gets the process while it runs."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )
    try:
        if during is not None:
            during(process)
        stdout, stderr = process.communicate(timeout=240)
    finally:
        left = marked(mark)
        for each in left:
            each.kill()
        process.wait()
    names = tuple(" ".join(each.info["cmdline"] or []) for each in left)
    return Ran(code=process.returncode, stdout=stdout, stderr=stderr, left=names)


def diagnose(
    *arguments: str | Path, folder: Path, schedule: Mapping[str, float] = BRIEF, **options: Any
) -> Ran:
    """`flatout diagnose` in `folder`."""
    return run([*flatout(schedule), *map(str, arguments)], folder=folder, **options)


def flatout(schedule: Mapping[str, float]) -> list[str]:
    """`flatout diagnose` with another schedule in the job's process."""
    start = f"from flatout.ground.script import main; main.START = {with_schedule(schedule)!r} + main.START; "
    return [sys.executable, "-c", start + "from flatout.cli.app import main; main()", "diagnose"]


def marked(mark: str) -> list[psutil.Process]:
    """Live processes that inherited the mark of a run."""
    return [
        process
        for process in psutil.process_iter(["environ", "cmdline", "status"])
        if (process.info["environ"] or {}).get(MARK) == mark
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]
