"""Diagnose a script, a loop or saved Evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flatout.doctor.examine import Diagnosis, examine
from flatout.ground import OnProgress, ignore
from flatout.measure.evidence_file import load_evidence


def diagnose_evidence(path: Path) -> Diagnosis:
    """Diagnose a saved Evidence file."""
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
    on_progress: OnProgress = ignore,
) -> Diagnosis:
    """Run `command` (a script or, with `module`, a module name, then its arguments) and diagnose it.

    The Evidence is written to `evidence_path` even when the job crashes or is interrupted; both raise.
    """
    from flatout.measure.run import launch

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
    on_progress: OnProgress = ignore,
) -> Diagnosis:
    """Diagnose a training loop given as `step(batch)` and a loader, in this process."""
    from flatout.measure.run.loop import observe_loop

    evidence = observe_loop(step, loader, seconds=seconds, on_progress=on_progress)
    return Diagnosis(evidence=evidence, findings=examine(evidence))


def write_diagnosis(diagnosis: Diagnosis, path: Path) -> None:
    """Write the report of a diagnosis as one self-contained page."""
    from flatout.doctor.report.page import page
    from flatout.page.document import write_page

    write_page(page(diagnosis.evidence, diagnosis.findings), path)
