"""Make a script faster by proven changes, and compare two versions of it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flatout.api.diagnosis import diagnose_script
from flatout.ground import OnProgress, ignore
from flatout.ground.errors import BadInput
from flatout.ground.torchrun import read_launch
from flatout.measure.evidence_file import load_evidence

if TYPE_CHECKING:
    from flatout.hardware.ray_cluster import RayCluster
    from flatout.measure.evidence import Evidence
    from flatout.tuner.check.check import Checked
    from flatout.tuner.results.outcome import Tuning

DIAGNOSIS_SHARE = 0.25  # of the minutes given, at most


def tune_script(
    command: Sequence[str],
    *,
    module: bool = False,
    allow_lossy: bool = False,
    only: Sequence[str] = (),
    patch: bool = False,
    evidence: Path | None = None,
    seconds: float = 60.0,
    resume: bool = False,
    ranks: int = 1,
    ray: str | None = None,
    minutes: float | None = None,
    on_progress: OnProgress = ignore,
) -> Tuning:
    """Try what makes a script faster without a change of its code, and keep what is proven.

    `evidence` is that of a diagnosis of the same command; without it the script is diagnosed first.  With
    `patch`, changes to the source are tried, too; `apply_patches` writes those that were kept.  `resume`
    continues an interrupted tuning of the same command in this folder.  `ranks` processes train together on
    this machine, as torchrun would start them.  `ray` is the address of a Ray cluster, whose nodes run the
    diagnosis and the trials.  Everything ends within `minutes`, the diagnosis included, unless the diagnosis
    and two pairs of unchanged runs take longer.
    """
    from flatout.ground.script.command import check_command
    from flatout.hardware.ray_cluster import RayCluster
    from flatout.measure.run.launch import writes_thrown_away
    from flatout.tuner.search.tune import tune
    from flatout.tuner.treatment import read_dose
    from flatout.tuner.trial.journal import evidence_of, journal_path

    began_s = time.monotonic()
    seconds = seconds if minutes is None else min(seconds, _diagnosis_s(minutes))
    check_command(command, module=module)
    for text in only:
        read_dose(text)
    if read_launch().num_ranks > 1:
        raise BadInput(
            "flatout tune starts its ranks itself",
            hint="run it without the launcher: flatout tune --ranks N train.py",
        )
    if evidence is None and resume:
        evidence = evidence_of(journal_path(tuple(command)))
    if evidence is None:
        on_progress("diagnosing the job")
    with contextlib.ExitStack() as stack:
        cluster = None if ray is None else stack.enter_context(RayCluster(ray))
        if cluster is not None:
            cluster.take(ranks)
        if evidence is None:
            stack.enter_context(writes_thrown_away())
        if evidence is None and cluster is not None:
            evidence = _diagnose_on(cluster, command, module=module, ranks=ranks, seconds=seconds)
        elif evidence is None and ranks > 1:
            evidence = _diagnose_ranks(command, module=module, ranks=ranks, seconds=seconds)
        if evidence is not None:
            known = load_evidence(evidence)
        else:
            diagnosis = diagnose_script(
                command, module=module, seconds=seconds, script_stdout_to_stderr=True, on_progress=on_progress
            )
            known, evidence = diagnosis.evidence, diagnosis.evidence_path
        if cluster is not None and known.job.device == "cpu":
            cluster.take(0)
        return tune(
            known,
            command,
            module=module,
            allow_lossy=allow_lossy,
            only=only,
            patch=patch,
            on_progress=on_progress,
            resume=resume,
            evidence_path=evidence,
            cluster=cluster,
            within_s=None if minutes is None else 60 * minutes - (time.monotonic() - began_s),
        )


def _diagnosis_s(minutes: float) -> float:
    """Return the seconds of a diagnosis, if everything is to end within some minutes."""
    if not minutes > 0:
        raise BadInput(f"minutes={minutes:g} leaves no time", hint="--minutes 10 ends within ten minutes")
    return DIAGNOSIS_SHARE * 60 * minutes


def _diagnose_on(
    cluster: RayCluster, command: Sequence[str], *, module: bool, ranks: int, seconds: float
) -> Path:
    """Diagnose a script on a node of a cluster, and return the file of its Evidence here."""
    from flatout.measure.evidence_file import save_evidence
    from flatout.measure.run import launch

    path = launch.default_evidence_path(command)
    _, evidence = cluster.result(cluster.submit(_diagnose_there, tuple(command), module, ranks, seconds))
    save_evidence(evidence, path)
    return path


def _diagnose_there(command: Sequence[str], module: bool, ranks: int, seconds: float) -> Evidence:
    """Diagnose a script on the machine of this process."""
    import tempfile

    from flatout.measure.run.launch import writes_thrown_away

    with writes_thrown_away(), tempfile.TemporaryDirectory(prefix="flatout-") as folder:
        if ranks > 1:
            return load_evidence(_diagnose_ranks(command, module=module, ranks=ranks, seconds=seconds))
        return diagnose_script(
            command,
            module=module,
            seconds=seconds,
            evidence_path=Path(folder) / "evidence.json",
            script_stdout_to_stderr=True,
        ).evidence


def _diagnose_ranks(command: Sequence[str], *, module: bool, ranks: int, seconds: float) -> Path:
    """Diagnose a script in several processes, and return the file of its Evidence."""
    import subprocess

    from flatout.measure.run import launch

    path = launch.default_evidence_path(command)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    given = [
        "diagnose",
        "--json",
        "--seconds",
        str(seconds),
        "--save",
        str(path),
        *(["-m"] if module else []),
    ]
    subprocess.run([*launcher, "-m", "flatout", *given, *command], stdout=subprocess.DEVNULL, check=False)
    if not path.is_file():
        raise BadInput("the job could not be diagnosed in several processes", hint="its output says why")
    return path


def run_tuned(command: Sequence[str], *, module: bool = False, prescription: Path | None = None) -> NoReturn:
    """Replace this process by a script under the treatments of a prescription, by default ./flatout.toml."""
    from flatout.ground.script.command import check_command
    from flatout.tuner.run import run

    check_command(command, module=module)
    run(command, module=module, prescription=prescription)


def check_script(
    command: Sequence[str],
    *,
    base: str | None = None,
    against: Path | None = None,
    module: bool = False,
    tolerance: float = 0.05,
    pairs: int = 8,
    on_progress: OnProgress = ignore,
) -> Checked:
    """Compare a script's source with a git revision or folder `base`, or with a saved result `against`."""
    from flatout.tuner.check.check import CheckOptions, check_against, check_sources

    options = CheckOptions(module=module, tolerance=tolerance, pairs=pairs, on_progress=on_progress)
    if (base is None) == (against is None):
        raise BadInput("nothing to compare with", hint="give either --base REF or --against FILE")
    if against is not None:
        return check_against(against, command, options)
    return check_sources(base or "", command, options)


def apply_patches(prescription: Path) -> list[Path]:
    """Write the patches of a prescription into the files they were proven on; a backup is kept first."""
    from flatout.planner.config.backups import FileEdit, apply_edits
    from flatout.tuner.patches.apply import edits_of
    from flatout.tuner.results.prescription import load_prescription

    edits = [
        FileEdit(path=path, before=before, after=after)
        for path, (before, after) in edits_of(load_prescription(prescription), folder=Path.cwd()).items()
    ]
    apply_edits(edits, root=Path.cwd(), config=prescription.absolute())
    return [Path(os.path.relpath(edit.path)) for edit in edits]


def undo_patches(prescription: Path) -> list[Path]:
    """Restore the files that `apply_patches` last wrote; raise BadInput if they were changed since."""
    from flatout.planner.config.backups import undo

    return [
        Path(saved.path) for saved in undo(Path.cwd(), config=prescription.absolute(), what="patch").files
    ]


def save_tuning(tuning: Tuning, path: Path) -> None:
    """Write the prescription of a tuning."""
    from flatout.tuner.results.prescription import save_prescription

    save_prescription(tuning.prescription, path)


def write_tuning(tuning: Tuning, path: Path) -> None:
    """Write the report of a tuning as one self-contained page."""
    from flatout.page.document import write_page
    from flatout.tuner.results.page import page

    write_page(page(tuning), path)
