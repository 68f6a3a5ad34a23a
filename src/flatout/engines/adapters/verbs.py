"""What `flatout adapt` does: train, status, evaluate, predict, export."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.engines.adapters import peft_format, run_folder
from flatout.engines.adapters.assembly import AdapterAssembly, check_encoder
from flatout.engines.adapters.evaluation import results
from flatout.engines.adapters.evaluation.predict import Answer, answer
from flatout.engines.adapters.evaluation.results import FILE, ROUTINGS, Evaluation, with_heads_only
from flatout.engines.adapters.evaluation.score_routings import Subject, score_routings
from flatout.engines.adapters.export_run import check_target, export_run
from flatout.engines.adapters.fill_settings import fill_settings
from flatout.engines.adapters.report.charts import plot_report
from flatout.engines.adapters.report.page import page as report_page
from flatout.engines.adapters.report.run_report import RunReport
from flatout.engines.adapters.run_folder import AdaptStatus
from flatout.engines.adapters.settings import VERB, AdaptSettings, make_settings, read_settings
from flatout.engines.adapters.tasks.known import naming_task_files
from flatout.engines.adapters.training.live_line import LiveLine
from flatout.engines.adapters.training.phase import PhaseRun
from flatout.engines.adapters.training.phase1_adapters import train_adapters
from flatout.engines.adapters.training.phase2_router import train_router
from flatout.engines.adapters.training.phase3_joint import train_jointly
from flatout.engines.adapters.training.records import KIND, PHASES, PhaseCheckpoint
from flatout.engines.run.folder import Outcome, choose_folder, draw_if_possible, find_begun, record_run
from flatout.engines.run.log import RunLog, log_path, read_log
from flatout.engines.run.meeting import Meeting
from flatout.engines.run.ranks import Ranks, choose_device, device_name
from flatout.engines.run.settings import given_settings, save_settings
from flatout.ground import OnProgress, ignore
from flatout.ground.codec import encode
from flatout.ground.documents import read_document, write_document
from flatout.ground.errors import BadInput
from flatout.ground.interrupts import Interrupts
from flatout.ground.runs import folder_of_run
from flatout.page.document import write_page

PLOT, PAGE = "run.png", "report.html"
HELD_OUT = ("test", "validation")
TRAIN: dict[str, Callable[[PhaseRun], None]] = {
    "phase1": train_adapters,
    "phase2": train_router,
    "phase3": train_jointly,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptOutcome(Outcome):
    """The result of training."""

    status: AdaptStatus
    plots: tuple[str, ...]
    skipped: tuple[str, ...]  # phases that were finished before
    sent_bytes: dict[str, int] = field(default_factory=dict)  # to other processes, by the first one, by what


def adapt(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    phases: tuple[str, ...] = PHASES,
    resume: bool = False,
    heads_only: bool = False,
    on_line: OnProgress = ignore,
    on_progress: OnProgress = ignore,
) -> AdaptOutcome:
    """Train adapters for several tasks and the router among them, as one of the launcher's processes.

    `settings` are keys and values, a YAML file or the folder of a run; `changes` override them.
    A process that torchrun restarted after a crash resumes, even if it was not asked to.
    """
    chosen = make_settings(given_settings(settings, changes, read=read_settings))
    meeting = Meeting.join(on_progress=on_progress)
    name = Path(chosen.model).name
    out, resume = meeting.begin(
        # A run with heads alone goes into the run's folder.
        lambda again: choose_folder(chosen.out, kind=VERB, name=name, resume=again or heads_only),
        begun=lambda: None if heads_only else find_begun(chosen.out, kind=VERB),
        resume=resume,
    )
    with Ranks.join(chosen.device, meeting=meeting) as ranks:
        if not ranks.first:
            on_line = on_progress = ignore
        chosen = dataclasses.replace(chosen, out=str(out))
        if heads_only and not chosen.heads_only:
            chosen = run_folder.without_adapters(chosen)
        if chosen.heads_only:
            phases = ("phase1",)
        with naming_task_files():
            chosen, splits = fill_settings(
                chosen, saved=run_folder.saved_settings(chosen.folder) if resume else None
            )
        waiting, notes = run_folder.phases_to_run(chosen, phases, resume=resume)
        steps = {phase: 0 if found is None else found.state.step for phase, found in waiting.items()}
        ranks.agree("the phases to train and their steps", steps)
        if not waiting:
            check_encoder(run_folder.furthest(chosen.folder), chosen.model)
        for note in notes:
            on_progress(note)
        if waiting:
            with (
                naming_task_files(),
                AdapterAssembly(chosen, ranks=ranks, splits=splits, on_progress=on_progress) as assembly,
            ):
                _train_phases(assembly, waiting, on_line=on_line, on_progress=on_progress)
        plots = _plot(chosen, on_progress=on_progress) if ranks.first else ()
    return AdaptOutcome(
        sent_bytes=dict(ranks.sent_bytes),
        out=str(chosen.folder),
        status=run_folder.read_status(chosen.folder),
        plots=plots,
        skipped=tuple(phase for phase in phases if phase not in waiting),
    )


def _train_phases(
    assembly: AdapterAssembly,
    waiting: Mapping[str, PhaseCheckpoint | None],
    *,
    on_line: OnProgress,
    on_progress: OnProgress,
) -> None:
    settings, device = assembly.settings, assembly.device
    out = settings.folder
    assembly.splits  # noqa: B018 - rows that cannot be read are refused before a file is written
    if (first := next(iter(waiting))) != "phase1":
        before = run_folder.latest_checkpoints(out)[PHASES[PHASES.index(first) - 1]]
        assert before is not None, "phases_to_run has checked this"
        assembly.load_best(before)
    elif waiting[first] is None and not settings.heads_only:
        for name, given in settings.tasks.items():
            if given.init is not None:
                peft_format.load_adapter(assembly.bank, name, peft_format.read_adapter(Path(given.init)))
                on_progress(f"{name}: begins from the adapter in {given.init}")
    # The steps of the router's phase are known when its rows are counted.
    steps = {
        "phase1": settings.phase1.steps,
        "phase2": settings.phase2.epochs,
        "phase3": settings.phase3.steps,
    }
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Interrupts(ask=True))
        live = stack.enter_context(LiveLine(cuda_index=device.index if device.type == "cuda" else None))
        log = None
        if assembly.ranks.first:
            log = stack.enter_context(RunLog(out, KIND, settings=encode(settings)))
            stack.enter_context(record_run(out, kind=VERB, name=Path(settings.model).name))
            save_settings(out, settings)
        for phase, found in waiting.items():
            run = PhaseRun(
                assembly,
                phase=phase,
                steps=steps[phase],
                found=found,
                log=log,
                live=live,
                stop=stop,
                on_line=on_line,
                on_progress=on_progress,
            )
            TRAIN[phase](run)
            assembly.load_weights(run.best)
            on_progress(f"{phase} is finished at step {run.step}")


def adapt_status(run: str | Path) -> AdaptStatus:
    """Read how far each phase of a run is."""
    return run_folder.read_status(folder_of_run(run))


def adapt_evaluate(
    run: str | Path,
    *,
    model: str | None = None,
    device: str | None = None,
    rows: int | None = None,
    split: str = "test",
    top_k: int | None = None,
    threshold: float | None = None,
    html: Path | None = None,
    on_progress: OnProgress = ignore,
) -> tuple[Evaluation, Path]:
    """Score a run on held-out rows; return (what was found, the page).

    The scores of a run without adapters, in DIR/heads-only, are added to compare.  `top_k` and `threshold`
    override the run's settings; choose them on `split="validation"`.
    """
    if rows is not None and rows < 1:
        raise BadInput(f"--rows {rows} is below 1", hint="give at least 1")
    if split not in HELD_OUT:
        raise BadInput(f"--split {split} is unknown", hint=f"use {' or '.join(HELD_OUT)}")
    out = folder_of_run(run)
    settings = run_folder.settings_of(out, model=model, device=device, top_k=top_k, threshold=threshold)
    found = _score(settings, rows=rows, split=split, on_progress=on_progress)
    other = out / run_folder.HEADS_ONLY
    if (other / "phase1").is_dir():
        heads = run_folder.settings_of(other, model=model, device=device)
        plain = _score(heads, rows=rows, split=split, on_progress=on_progress)
        write_document(other / FILE, plain, results.KIND)
        found = with_heads_only(found, plain)
    write_document(out / FILE, found, results.KIND)
    page = html or out / PAGE
    write_page(report_page(_read_report(settings)), page)
    _plot(settings, on_progress=on_progress)
    return found, page


def adapt_predict(
    run: str | Path,
    texts: Sequence[str],
    *,
    context: str | None = None,
    task: str | None = None,
    model: str | None = None,
    device: str | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
) -> list[Answer]:
    """Answer texts with what a run learned."""
    out = folder_of_run(run)
    settings = run_folder.settings_of(out, model=model, device=device, top_k=top_k, threshold=threshold)
    with _open_best(settings) as (assembly, routed):
        return answer(assembly, texts, context=context, task=task, routed=routed)


def adapt_export(
    run: str | Path, *, to: Path, tasks: Sequence[str] | None = None, model: str | None = None
) -> list[Path]:
    """Write adapters, heads and the router as files that need no Flatout; another run's are not replaced."""
    out = folder_of_run(run)
    settings = run_folder.settings_of(out, model=model, device="cpu")
    check_target(to, run=out)
    with _open_best(settings) as (assembly, routed):
        return export_run(assembly, to=to, run=out, tasks=tasks, routed=routed)


@contextlib.contextmanager
def _open_best(settings: AdaptSettings) -> Iterator[tuple[AdapterAssembly, bool]]:
    """Open a run with the best weights of its last phase: (its parts, whether its router is trained)."""
    found = run_folder.furthest(settings.folder)
    ranks = Ranks(device=choose_device(settings.device))
    with naming_task_files(), AdapterAssembly(settings, ranks=ranks) as assembly:
        assembly.load_best(found)
        assembly.train(False)
        yield assembly, found.state.phase != "phase1"


def _score(settings: AdaptSettings, *, rows: int | None, split: str, on_progress: OnProgress) -> Evaluation:
    with _open_best(settings) as (assembly, routed):
        number = rows or settings.evaluation.rows
        subjects = {}
        for name, part in assembly.parts.items():
            chosen = assembly.rows(name, split, number=number)
            subjects[name] = Subject(
                task=part.task,
                head=part.head,
                examples=chosen.examples,
                records=chosen.records,
                features=assembly.features(chosen.examples) if routed else None,
            )
        on_progress(f"{settings.out}: {sum(len(each.examples) for each in subjects.values())} {split} rows")
        missing = [assembly.missing_classes(name, split, number=number) for name in subjects]
        notes = tuple(f"{note}." for note in missing if note is not None)
        for note in notes:
            on_progress(note)
        found = score_routings(
            subjects,
            encoder=assembly.encoder,
            tokenizer=assembly.tokenizer,
            pad_id=assembly.pad_id,
            decider=assembly.decider if routed else None,
            tokens=settings.evaluation.tokens,
            seed=settings.seed,
            split=split,
            routings=("oracle",) if settings.heads_only else ROUTINGS,
        )
        return dataclasses.replace(found, notes=found.notes + notes)


def _read_report(settings: AdaptSettings) -> RunReport:
    out = settings.folder
    path = out / FILE
    records = tuple(read_log(out, KIND)) if log_path(out).exists() else ()
    return RunReport(
        name=out.name,
        model=Path(settings.model).name,
        evaluation=read_document(path, Evaluation, results.KIND) if path.exists() else None,
        records=records,
        device=device_name(choose_device(settings.device)),
        notes=tuple(f"{record.phase}: {note}." for record in records for note in record.notes),
    )


def _plot(settings: AdaptSettings, *, on_progress: OnProgress) -> tuple[str, ...]:
    """Draw the picture of a run."""
    report = _read_report(settings)
    drawn = draw_if_possible(lambda: plot_report(report, settings.folder / PLOT), on_progress=on_progress)
    return () if drawn is None else (drawn,)
