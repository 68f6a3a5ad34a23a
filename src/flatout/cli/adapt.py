"""`flatout adapt`: adapters for several tasks on one frozen encoder, and the router that picks among them.

`train` runs the phases, `status` says how far a run is, `evaluate` scores it under several ways of routing,
`predict` answers a text, `export` writes adapters, heads and router as files that need no Flatout.  Results
go to stdout, progress to stderr.  Under torchrun or `accelerate launch` every process runs `train`, and the
first one speaks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.cli import flags
from flatout.cli.flags import flag, option, switch
from flatout.cli.output import print_document
from flatout.cli.render.progress import launched_line, live_line
from flatout.ground.errors import BadInput
from flatout.ground.units import show, show_seconds, show_share

if TYPE_CHECKING:
    from flatout.engines.adapters.evaluation.results import Evaluation
    from flatout.engines.adapters.run_folder import AdaptStatus, PhaseStatus

adapt = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

PHASES = {"1": ("phase1",), "2": ("phase2",), "3": ("phase3",), "all": ("phase1", "phase2", "phase3")}
Model = Annotated[
    str | None, flag("--model", "FOLDER", "Folder of the encoder and its tokenizer, if it moved.")
]
TopK = Annotated[int | None, flag("--top-k", "N", "Mix N adapters per row; default: the run's setting.")]
Threshold = Annotated[
    float | None,
    flag(
        "--threshold",
        "SHARE",
        "Let router.fallback decide below this confidence; default: the run's setting.",
    ),
]


@adapt.callback()
def about() -> None:
    """Train adapters for several tasks in one batch, and their router.

    The encoder stays frozen.  Phase 1 trains adapters and heads, phase 2 the router, phase 3 both.

    \b
    Examples:
      flatout adapt train five.yaml --phase all
      flatout adapt train five.yaml --phase all --resume
      flatout adapt train five.yaml --heads-only       train the same heads without adapters, for comparison
      flatout adapt evaluate runs/five
      flatout adapt predict runs/five "What a wonderful film."
      flatout adapt export runs/five --to peft/
      torchrun --nproc_per_node 2 -m flatout adapt train five.yaml --set phase1.accumulate=2
      srun flatout adapt train five.yaml --out /shared/five --set phase1.accumulate=8
    """


@adapt.command()
def train(
    ctx: typer.Context,
    config: flags.Config,
    phase: Annotated[str, flag("--phase", "WHICH", "Train phase 1, 2, 3 or all.")] = "all",
    resume: flags.Resume = False,
    heads_only: Annotated[
        bool, switch("--heads-only", "Train phase 1 without adapters, into DIR/heads-only.")
    ] = False,
    model: Model = None,
    out: flags.Out = None,
    device: flags.Device = None,
    settings: flags.Set = None,
    json_output: flags.Json = False,
) -> None:
    """Train one phase or all.

    Phase 1 trains adapters and heads, phase 2 the router, phase 3 both together.  DIR gets log.jsonl,
    TensorBoard files, a folder of checkpoints per phase, and plots. --resume skips finished phases, says so,
    and continues an interrupted one where it stopped.

    \b
    Examples:
      flatout adapt train examples/adapters/generated.yaml --phase 1
      flatout adapt train five.yaml --phase all --resume --set phase3.steps=200
      flatout adapt train runs/five --resume                     continue with the run's settings

    Exit codes: 0 trained, 2 flatout could not do its work, 130 interrupted (the last checkpoint is kept).
    """
    if phase not in PHASES:
        raise BadInput(f"--phase {phase!r} does not exist", hint="give 1, 2, 3 or all")
    if heads_only and phase in ("2", "3"):
        raise BadInput(
            f"--heads-only has no phase {phase}", hint="omit --phase: heads alone train in phase 1"
        )
    import flatout.api as api

    with launched_line() as (first, on_line, on_progress):
        outcome = api.adapt(
            config or {},
            changes=flags.collect(ctx, apart=["phase", "heads_only"]),
            phases=("phase1",) if heads_only else PHASES[phase],
            resume=resume,
            heads_only=heads_only,
            on_line=on_line,
            on_progress=on_progress,
        )
    if not first:
        return
    if json_output:
        print_document("flatout-adapters", outcome)
        return
    _show_status(outcome.status)
    for path in outcome.plots:
        typer.echo(f"plot  {path}")


@adapt.command()
def status(run: flags.Run, json_output: flags.Json = False) -> None:
    """Show how far a run is, and its best scores on held-out rows.

    Each phase has its own lines.  For an interrupted phase it also shows the command that continues it.

    \b
    Examples:
      flatout adapt status runs/five
      flatout adapt status runs/five --json
    """
    import flatout.api as api

    found = api.adapt_status(run)
    if json_output:
        print_document("flatout-adapters-status", found)
        return
    _show_status(found)


@adapt.command()
def evaluate(
    ctx: typer.Context,
    run: flags.Run,
    html: flags.Html = None,
    model: Model = None,
    device: flags.Device = None,
    rows: int | None = option("--rows", "N", "Score N rows per task; default: the run's setting."),
    split: Annotated[
        str, flag("--split", "NAME", "Score the test rows, or validation to choose settings.")
    ] = "test",
    top_k: TopK = None,
    threshold: Threshold = None,
    json_output: flags.Json = False,
) -> None:
    """Score a run on held-out rows, under several ways of routing.

    These are oracle, routed, single adapter, uniform mix and random.  The run's folder gets evaluation.json
    and report.html. A heads-only run in it is shown for comparison.

    \b
    Examples:
      flatout adapt evaluate runs/five
      flatout adapt evaluate runs/five --rows 200 --html five.html --json
      flatout adapt evaluate runs/five --split validation --top-k 1     one adapter per row: is that better?
    """
    import flatout.api as api

    with live_line() as (_, on_progress):
        given = flags.collect(ctx, apart=["run", "html"])
        found, page = api.adapt_evaluate(run, **given, html=html, on_progress=on_progress)
    if json_output:
        print_document("flatout-adapters-evaluation", found)
        return
    _show_evaluation(found, page)


@adapt.command()
def predict(
    ctx: typer.Context,
    run: flags.Run,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text; default: each line of stdin.")
    ] = None,
    context: str | None = option(
        "--context", "TEXT", "The text a question is about; the answer is a span of it."
    ),
    task: str | None = option("--task", "NAME", "Use this task instead of the router's choice."),
    model: Model = None,
    device: flags.Device = None,
    top_k: TopK = None,
    threshold: Threshold = None,
    json_output: flags.Json = False,
) -> None:
    """Answer a text with the task that the router picks.

    The task's adapter and head give the answer.

    \b
    Examples:
      flatout adapt predict runs/five "What a wonderful film."
      flatout adapt predict runs/five "Who wrote it?" --context "It was written by Ada." --json
      flatout adapt predict runs/five "Return the sum of two numbers." --task code
    """
    import flatout.api as api
    from flatout.page.printable import printable

    lines = [text] if text is not None else sys.stdin.read().splitlines()
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise BadInput("there is no text to answer", hint="pass it as an argument, or as lines on stdin")
    answers = api.adapt_predict(run, texts, **flags.collect(ctx, apart=["run", "text"]))
    if json_output:
        print_document("flatout-adapters-predictions", answers=answers)
        return
    for each in answers:
        written = printable(each.text, keep="\n\t")  # code has lines, and may hold terminal codes
        typer.echo(f"{each.task} ({show_share(each.confidence)}): {written}")


@adapt.command()
def export(
    run: flags.Run,
    to: Annotated[Path, flag("--to", "DIR", "Write the router and a folder per adapter here.")],
    task: list[str] | None = option("--task", "NAME", "Export only this task; repeatable."),
    model: Model = None,
    json_output: flags.Json = False,
) -> None:
    """Write adapters, heads and router as files that need no Flatout.

    PEFT's `PeftModel.from_pretrained` loads an adapter's folder, which also holds its head and labels. A run
    replaces its earlier export. A DIR with another run's export is refused.

    \b
    Examples:
      flatout adapt export runs/five --to peft/
      flatout adapt export runs/five --to peft/ --task qa
    """
    import flatout.api as api

    folders = [str(folder) for folder in api.adapt_export(run, to=to, tasks=task, model=model)]
    if json_output:
        print_document("flatout-adapters-export", folders=folders)
        return
    for folder in folders:
        typer.echo(folder)


def _show_status(found: AdaptStatus) -> None:
    typer.echo(found.out)
    for phase in found.phases:
        took = f", {show_seconds(phase.elapsed_s)}" if phase.elapsed_s is not None else ""
        typer.echo(f"{phase.name}  {_how_far(phase)}{took}")
        for name, progress in phase.progress.items():
            scores = ", ".join(f"{key} {value:.4g}" for key, value in progress.scores.items())
            best = show(progress.best_step, "best at step {}")
            left = "" if progress.done in (None, phase.step) else f", left at step {progress.done}"
            if left and progress.left_because is not None:
                left += f" because {progress.left_because}"
            typer.echo(f"  {name:<16}  {best}{left}{f': {scores}' if scores else ''}")
    if found.resume is not None:
        typer.echo(f"continue with  {found.resume}")


def _how_far(phase: PhaseStatus) -> str:
    """Say the last known step of a phase, its state, and the step of its last checkpoint."""
    if phase.state in ("not begun", "finished"):
        done = "" if phase.step is None else f"step {phase.step} of {phase.steps}, "
        return done + phase.state
    step = phase.step if phase.logged_step is None else phase.logged_step
    of = "" if phase.steps is None else f" of {phase.steps}"
    kept = "no checkpoint yet" if phase.step is None else f"kept at step {phase.step}"
    return f"step {step}{of}, {phase.state}{'' if step == phase.step else f', {kept}'}"


def _show_evaluation(found: Evaluation, page: Path) -> None:
    from flatout.engines.adapters.evaluation.results import ROUTINGS

    heads = found.heads_only is not None
    titles = [*ROUTINGS, *(["heads only"] if heads else [])]
    typer.echo(f"{'task':<18}{'metric':<16}" + "".join(f"{title:>12}" for title in titles))
    for task in found.tasks:
        for place, name in enumerate(found.score_names(task)):
            values = [found.score(task, routing, name=name) for routing in ROUTINGS]
            if heads:
                values.append(found.heads_only_score(task, name=name))
            cells = "".join(f"{show(value, '{:.1f}'):>12}" for value in values)
            typer.echo(f"{'' if place else task:<18}{name:<16}{cells}")
    if found.routing is not None:
        typer.echo(f"routing accuracy {show_share(found.routing.accuracy_share)}")
    for note in found.notes:
        typer.echo(note)
    typer.echo(f"report  {page}")
