"""`flatout diagnose` in a process of its own, on the scripts of tests/cli."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from flatout.ground.script.main import START
from flatout.measure.evidence import Evidence, Loader
from flatout.measure.evidence_file import load_evidence
from flatout.measure.run.child import MODULE
from flatout.measure.run.lineage import ARM_FAILED, FAILED_BESIDE, FAILED_UNDER
from tests.support.measure import BRIEF, flatout, with_schedule
from tests.support.warm_python import warm

SCRIPTS = Path(__file__).resolve().parents[1] / "cli" / "scripts"
SECONDS = 90.0  # more than the fewest rounds need on a busy machine: the scripts take a millisecond per step
BRIEFLY = ("--seconds", str(SECONDS))
ARMS = {"warmup", "real", "stacks", "count", "kernels", "attribution", "memory", "cached", "half"}
COUNTERFACTUAL = ("cached", "half")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONFAULTHANDLER": "1",  # a job that dies hard says where
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run of `flatout diagnose` left."""

    code: int
    stdout: str
    stderr: str
    evidence: Evidence | None

    @property
    def measured(self) -> Evidence:
        """The evidence of a job that was measured to the end and found to have steps."""
        assert self.evidence is not None, self.stderr
        assert self.evidence.job.ended == "measured", self.stderr
        assert self.code in (0, 1), self.stderr
        return self.evidence


def observe(*command: str | Path, save: Path, folder: Path = SCRIPTS) -> Outcome:
    """Run a script as the observed process of a diagnosis, without the launching one and the imports.

    As there, a script that fails under an arm runs again without that arm.
    """
    options = {
        "command": [*map(str, command)],
        "module": False,
        "folder": str(folder),
        "evidence_path": str(folder / save),
        "keep_running": False,
        "seconds": SECONDS,
        "progress_fd": None,
    }
    code = with_schedule(BRIEF) + START.format(module=MODULE)
    skipped: dict[str, str] = {}
    while True:
        done = warm().run("python", "-c", code, json.dumps({**options, "skipped": skipped}), cwd=folder)
        outcome = _outcome(done, folder / save)
        if done.returncode != ARM_FAILED:
            return outcome
        assert outcome.evidence is not None
        failed = {arm.label: arm.reason for arm in outcome.evidence.arms_not_run if "failed" in arm.reason}
        assert skipped.keys() < failed.keys(), done.stderr
        skipped = {label: reason.replace(FAILED_BESIDE, FAILED_UNDER) for label, reason in failed.items()}


def diagnose(
    *command: str | Path, save: Path, options: tuple[str, ...] = BRIEFLY, folder: Path = SCRIPTS
) -> Outcome:
    """Run `flatout diagnose` in `folder`; `save` names the Evidence file, relative to it or not."""
    done = subprocess.run(
        [*flatout(BRIEF), *options, "--save", str(save), *map(str, command)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    return _outcome(done, folder / save)


def _outcome(done: subprocess.CompletedProcess[str], path: Path) -> Outcome:
    return Outcome(
        code=done.returncode,
        stdout=done.stdout,
        stderr=done.stderr,
        evidence=load_evidence(path) if path.exists() else None,
    )


def unobserved(*command: str, code: int = 0) -> str:
    """What the command prints where nobody watches it."""
    done = warm().run("python", *command, cwd=SCRIPTS)
    assert done.returncode == code, done.stderr
    return done.stdout


def arms(evidence: Evidence) -> set[str]:
    """What of ARMS was run; whether another arm was worth proposing is a matter of time."""
    return {step.arm for step in evidence.steps} & ARMS


def the_loader(evidence: Evidence) -> Loader:
    (loader,) = evidence.loaders
    return loader


def assert_measured(evidence: Evidence, *, anchor: str, batches: int = 1) -> None:
    """Every arm was run on a loop of the usual kind, and nothing is missing."""
    assert evidence.job.anchor == anchor
    assert arms(evidence) == ARMS
    assert evidence.missing == ()
    assert {"cached", "half"} <= {each.kind for each in evidence.counterfactuals}
    per_step = Counter(step.num_batches for step in evidence.steps).most_common(1)[0][0]
    assert per_step == batches
    assert {step.num_backwards for step in evidence.steps if step.arm in ARMS} == {batches}
    assert the_loader(evidence).trains


def line_of(script: str, text: str) -> int:
    """The line of `script` that holds `text`, which stands there once."""
    lines = (SCRIPTS / script).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if text in line)
    return number


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("loss ")]


@contextlib.contextmanager
def modules_of(folder: Path, names: Sequence[str]) -> Iterator[SimpleNamespace]:
    """The modules of an example, imported as its own scripts import them."""
    sys.path.insert(0, str(folder))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
