"""What `flatout adapt` does: train, evaluate, predict, export."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.codec import encode
from flatout.engines.adapters import peft_format, run_folder
from flatout.engines.adapters.assembly import Assembly
from flatout.engines.adapters.evaluation.predict import Answer, answer
from flatout.engines.adapters.evaluation.results import (
    FILE,
    ROUTINGS,
    Evaluation,
    load_evaluation,
    save_evaluation,
    with_heads_only,
)
from flatout.engines.adapters.evaluation.score_routings import Decider, Subject
from flatout.engines.adapters.evaluation.score_routings import evaluate as score_routings
from flatout.engines.adapters.loading import open_encoder
from flatout.engines.adapters.report.charts import plot_report
from flatout.engines.adapters.report.page import page as report_page
from flatout.engines.adapters.report.run_report import RunReport
from flatout.engines.adapters.run_folder import Status
from flatout.engines.adapters.settings import AdaptConfig, make_config
from flatout.engines.adapters.training.checkpoint import PHASES, Checkpoint, check_model, fingerprint
from flatout.engines.adapters.training.live_line import LiveLine
from flatout.engines.adapters.training.log import RunLog, read_log
from flatout.engines.adapters.training.phase import PhaseRun
from flatout.engines.adapters.training.phase1_adapters import train_adapters
from flatout.engines.adapters.training.phase2_router import frozen_features, train_router
from flatout.engines.adapters.training.phase3_joint import train_jointly
from flatout.engines.adapters.training.processes import Processes
from flatout.engines.adapters.training.stopping import StopRequest
from flatout.engines.run.log import log_path
from flatout.errors import BadInput, MissingExtra
from flatout.page.document import write_page

PLOT, PAGE = "run.png", "report.html"
HELD_OUT = ("test", "validation")
TRAIN: dict[str, Callable[[PhaseRun], None]] = {
    "phase1": train_adapters,
    "phase2": train_router,
    "phase3": train_jointly,
}
OnText = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What training left."""

    status: Status
    plots: tuple[str, ...]
    skipped: tuple[str, ...]  # phases that were finished before


def train(
    given: Mapping[str, Any],
    *,
    phases: tuple[str, ...] = PHASES,
    resume: bool = False,
    heads_only: bool = False,
    on_line: OnText = lambda line: None,
    on_note: OnText = lambda note: None,
) -> Outcome:
    """Train some phases of the config that is `given`, as one of the launcher's processes.

    A process that torchrun started again after a crash resumes, whether it was asked to or not.
    """
    config = make_config(given)
    if heads_only and not config.heads_only:
        config = run_folder.without_adapters(config)
    if config.heads_only:
        phases = ("phase1",)
    resume = resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    with Processes.join(config.device) as processes:
        if not processes.first:
            on_line = on_note = _nothing
        waiting, notes = run_folder.to_do(config, phases, resume=resume)
        processes.agree("the phases to train", len(waiting))
        if not waiting:
            _check_same_model(config)
        for note in notes:
            on_note(note)
        if waiting:
            with Assembly(config, processes=processes, on_note=on_note) as assembly:
                _train_phases(assembly, waiting, on_line=on_line, on_note=on_note)
        plots = _plots(config, on_note=on_note) if processes.first else ()
    skipped = tuple(phase for phase in phases if phase not in waiting)
    return Outcome(status=run_folder.status(Path(config.out)), plots=plots, skipped=skipped)


def evaluate(
    out: Path,
    *,
    model: str | None = None,
    device: str | None = None,
    rows: int | None = None,
    split: str = "test",
    top_k: int | None = None,
    threshold: float | None = None,
    html: Path | None = None,
    on_note: OnText = lambda note: None,
) -> tuple[Evaluation, Path]:
    """Score the run in a folder on rows held out, beside the one without adapters where there is one.

    `top_k` and `threshold` route otherwise than the run's config says; choose them on `split="validation"`.
    """
    if rows is not None and rows < 1:
        raise BadInput(f"--rows {rows}", hint="take at least 1")
    if split not in HELD_OUT:
        raise BadInput(f"--split {split}", hint=f"take {' or '.join(HELD_OUT)}")
    config = run_folder.config_of(out, model=model, device=device, top_k=top_k, threshold=threshold)
    found = _evaluated(config, rows=rows, split=split, on_note=on_note)
    other = out / run_folder.HEADS_ONLY
    if (other / "phase1").is_dir():
        heads = run_folder.config_of(other, model=model, device=device)
        plain = _evaluated(heads, rows=rows, split=split, on_note=on_note)
        save_evaluation(plain, other / FILE)
        found = with_heads_only(found, plain)
    save_evaluation(found, out / FILE)
    page = html or out / PAGE
    write_page(report_page(_report(config, found)), page)
    _plots(config, on_note=on_note)
    return found, page


def predict(
    out: Path,
    texts: Sequence[str],
    *,
    context: str | None = None,
    task: str | None = None,
    model: str | None = None,
    device: str | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
) -> list[Answer]:
    """Answer texts with what the run in a folder learned."""
    config = run_folder.config_of(out, model=model, device=device, top_k=top_k, threshold=threshold)
    with _opened(config) as (assembly, found):
        routed = found.state.phase != "phase1"
        return answer(assembly, texts, context=context, task=task, routed=routed)


def export(
    out: Path, *, to: Path, tasks: Sequence[str] | None = None, model: str | None = None
) -> list[Path]:
    """Write adapters as folders that PEFT loads."""
    with _opened(run_folder.config_of(out, model=model, device="cpu")) as (assembly, _):
        chosen = list(tasks or assembly.names)
        for name in chosen:
            assembly.bank.number(name)  # an unknown name is said before anything is written
        for name in chosen:
            peft_format.export(assembly.bank, name, to / name, base_model_name=assembly.config.model)
    return [to / name for name in chosen]


def status(out: Path) -> Status:
    """How far the run in a folder is."""
    return run_folder.status(out)


def _check_same_model(config: AdaptConfig) -> None:
    """A run with nothing left to train: its model is looked at all the same, as where it goes on."""
    found = run_folder.furthest(Path(config.out))
    model = open_encoder(Path(config.model), device=torch.device("cpu"))
    name = fingerprint(model.named_parameters())
    check_model(found.state, fingerprint=name, model=config.model, path=found.path)


def _train_phases(
    assembly: Assembly, waiting: Mapping[str, Checkpoint | None], *, on_line: OnText, on_note: OnText
) -> None:
    config, processes = assembly.config, assembly.processes
    out = Path(config.out)
    assembly.splits  # noqa: B018 - rows that cannot be read are said before a file is written
    first = next(iter(waiting))
    if first != "phase1":
        assembly.load_best(run_folder.before(out, first))
    cuda_index = assembly.device.index if assembly.device.type == "cuda" else None
    with (
        StopRequest() as stop,
        LiveLine(cuda_index=cuda_index) as live,
        RunLog(out, settings=encode(config)) if processes.first else contextlib.nullcontext() as log,
    ):
        for phase, found in waiting.items():
            run = PhaseRun(
                assembly,
                phase=phase,
                steps=_steps(config, phase),
                found=found,
                log=log,
                live=live,
                stop=stop,
                on_line=on_line,
                on_note=on_note,
            )
            TRAIN[phase](run)
            assembly.load_weights(run.best)
            on_note(f"{phase} is finished at step {run.step}")


def _steps(config: AdaptConfig, phase: str) -> int:
    """Optimizer steps of a phase; those of the router are known when its rows are counted."""
    return {"phase1": config.phase1.steps, "phase2": config.phase2.epochs, "phase3": config.phase3.steps}[
        phase
    ]


@contextlib.contextmanager
def _opened(config: AdaptConfig) -> Any:
    """A run's parts with the best weights of its last phase."""
    found = run_folder.furthest(Path(config.out))
    processes = Processes.join(config.device)
    with Assembly(config, processes=processes) as assembly:
        check_model(found.state, fingerprint=assembly.fingerprint, model=config.model, path=found.path)
        assembly.load_weights(found.best())
        assembly.train(False)
        yield assembly, found


def _evaluated(config: AdaptConfig, *, rows: int | None, split: str, on_note: OnText) -> Evaluation:
    with _opened(config) as (assembly, found):
        routed = found.state.phase != "phase1"
        number = rows or config.evaluation.rows
        subjects = {}
        for name, part in assembly.parts.items():
            chosen = assembly.rows(name, split, number=number)
            subjects[name] = Subject(
                task=part.task,
                head=part.head,
                examples=chosen.examples,
                records=chosen.records,
                features=frozen_features(assembly, chosen.examples) if routed else None,
            )
        on_note(f"{config.out}: {sum(len(each.examples) for each in subjects.values())} {split} rows")
        given = config.router
        decider = Decider(
            router=assembly.router,
            threshold=given.threshold,
            top_k=min(given.top_k, len(subjects)),
            fallback=given.fallback,
        )
        return score_routings(
            subjects,
            encoder=assembly.encoder,
            tokenizer=assembly.tokenizer,
            pad_id=assembly.pad_id,
            decider=decider if routed else None,
            tokens=config.evaluation.tokens,
            seed=config.seed,
            split=split,
            routings=("oracle",) if config.heads_only else ROUTINGS,
        )


def _report(config: AdaptConfig, evaluation: Evaluation | None) -> RunReport:
    out = Path(config.out)
    records = tuple(read_log(out)) if log_path(out).exists() else ()
    return RunReport(
        name=out.name,
        model=Path(config.model).name,
        evaluation=evaluation,
        records=records,
        device=_device_name(config),
        notes=tuple(f"{record.phase}: {note}." for record in records for note in record.notes),
    )


def _device_name(config: AdaptConfig) -> str | None:
    if config.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    from flatout.hardware.host import read_host

    return read_host().cpu_model


def _plots(config: AdaptConfig, *, on_note: OnText) -> tuple[str, ...]:
    """The picture of a run; without matplotlib the run is whole, and says what is missing."""
    path = Path(config.out) / FILE
    evaluation = load_evaluation(path) if path.exists() else None
    try:
        return (str(plot_report(_report(config, evaluation), Path(config.out) / PLOT)),)
    except MissingExtra as error:
        on_note(f"no plot: {error}")
        return ()


def _nothing(text: str) -> None:
    return None
