"""`flatout diagnose` in a process of its own, on the scripts of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from flatout.measure.evidence import Evidence, Loader
from flatout.measure.evidence_file import load_evidence

SCRIPTS = Path(__file__).resolve().parents[1] / "cli" / "scripts"
# No more seconds than the fewest rounds of counterfactuals need: the scripts take a millisecond per step.
BRIEFLY = ("--seconds", "90")
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


def diagnose(
    *command: str | Path, save: Path, options: tuple[str, ...] = BRIEFLY, folder: Path = SCRIPTS
) -> Outcome:
    """Run `flatout diagnose` in `folder`; `save` names the Evidence file, relative to it or not."""
    done = subprocess.run(
        [*flatout(), *options, "--save", str(save), *map(str, command)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    path = folder / save
    return Outcome(
        code=done.returncode,
        stdout=done.stdout,
        stderr=done.stderr,
        evidence=load_evidence(path) if path.exists() else None,
    )


def unobserved(*command: str, code: int = 0) -> str:
    """What the command prints where nobody watches it."""
    done = subprocess.run(
        [sys.executable, *command], cwd=SCRIPTS, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
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


def flatout() -> list[str]:
    return [sys.executable, "-m", "flatout", "diagnose"]


def line_of(script: str, text: str) -> int:
    """The line of `script` that holds `text`, which stands there once."""
    lines = (SCRIPTS / script).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if text in line)
    return number


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("loss ")]
