"""The verbs: the only place where rooms are composed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.codec import encode
from flatout.doctor.examine import examine
from flatout.doctor.finding import Finding
from flatout.measure.evidence import Evidence
from flatout.measure.evidence_file import load_evidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Evidence and what the doctor concludes from it."""

    evidence: Evidence
    findings: tuple[Finding, ...]
    evidence_path: Path | None = None
    script_exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "flatout-diagnosis",
            "version": 1,
            "findings": encode(self.findings),
            "evidence": self.evidence.to_json(),
        }


def diagnose_evidence(path: Path) -> Diagnosis:
    """The findings of a saved Evidence file."""
    evidence = load_evidence(path)
    return Diagnosis(evidence=evidence, findings=examine(evidence), evidence_path=path)


def diagnose_script(
    command: Sequence[str],
    *,
    module: bool = False,
    keep_running: bool = False,
    evidence_path: Path | None = None,
    seconds: float = 60.0,
    script_stdout_to_stderr: bool = False,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Diagnosis:
    """Run `command` (a script or, with `module`, a module name, then its arguments) and diagnose it.

    The Evidence is written to `evidence_path` even when the job crashes or is interrupted; both raise.
    """
    from flatout.measure import launch

    path = evidence_path or launch.default_evidence_path(command)
    evidence = launch.run_job(
        command,
        module=module,
        keep_running=keep_running,
        evidence_path=path,
        seconds=seconds,
        script_stdout_to_stderr=script_stdout_to_stderr,
        on_progress=on_progress,
    )
    return Diagnosis(
        evidence=evidence,
        findings=examine(evidence),
        evidence_path=path,
        script_exit_code=evidence.job.exit_code,
    )


def diagnose(
    step: Callable[[Any], Any],
    loader: Iterable[Any],
    *,
    seconds: float = 60.0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Diagnosis:
    """Diagnose a training loop given as `step(batch)` and a loader, in this process."""
    from flatout.measure.loop import observe_loop

    evidence = observe_loop(step, loader, seconds=seconds, on_progress=on_progress)
    return Diagnosis(evidence=evidence, findings=examine(evidence))
