"""`flatout adapt`: adapters for several tasks on one frozen encoder, and the router that picks among them.

`train` runs the phases, `status` says how far a run is, `evaluate` scores it under several ways of routing,
`predict` answers a text, `export` writes folders that PEFT loads.  Results go to stdout, progress to stderr.
Under torchrun or `accelerate launch` every process runs `train`, and the first one speaks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.errors import BadInput, Interrupted
from flatout.units import UNKNOWN, show_seconds, show_share

if TYPE_CHECKING:
    from flatout.engines.adapters.evaluation.results import Evaluation
    from flatout.engines.adapters.run_folder import PhaseStatus, Status
    from flatout.engines.adapters.verbs import Outcome

adapt = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)

PHASES = {"1": ("phase1",), "2": ("phase2",), "3": ("phase3",), "all": ("phase1", "phase2", "phase3")}
Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML file with settings, or the folder of a run.")
]
Run = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="auto, cpu or cuda.")]
Model = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="The encoder and its tokenizer, if they moved.")
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", metavar="N", help="Adapters mixed per row; by default the config's."),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE", help="Confidence below which router.fallback decides; by default the config's."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@adapt.callback()
def about() -> None:
    """Train adapters for several tasks in one batch on a frozen encoder, then the router, then both.

    \b
    Examples:
      flatout adapt train five.yaml --phase all
      flatout adapt train five.yaml --phase all --resume
      flatout adapt train five.yaml --heads-only       the same heads without adapters, to compare with
      flatout adapt evaluate runs/five
      flatout adapt predict runs/five "What a wonderful film."
      flatout adapt export runs/five --to peft/
      torchrun --nproc_per_node 2 -m flatout adapt train five.yaml --set phase1.accumulate=2
    """


@adapt.command()
def train(
    config: Config,
    phase: Annotated[str, typer.Option(metavar="WHICH", help="1, 2, 3 or all.")] = "all",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoints, bit for bit.")
    ] = False,
    heads_only: Annotated[
        bool, typer.Option("--heads-only", help="Phase 1 without adapters, into DIR/heads-only.")
    ] = False,
    model: Model = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Where everything goes.")] = None,
    device: Device = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting: phase1.steps=100.")
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Train a phase or all: 1 adapters and heads, 2 the router, 3 both together.

    DIR gets log.jsonl, TensorBoard files, a folder of checkpoints per phase and plots. A phase that is
    finished is skipped by --resume, which says so; an interrupted one goes on where it stopped.

    \b
    Examples:
      flatout adapt train examples/adapters/generated.yaml --phase 1
      flatout adapt train five.yaml --phase all --resume --set phase3.steps=200
      flatout adapt train runs/five --resume                     with the settings that the run has

    Exit codes: 0 trained, 2 flatout could not do its work, 130 interrupted; the last checkpoint is kept.
    """
    if phase not in PHASES:
        raise BadInput(f"no phase {phase!r}", hint="1, 2, 3 or all")
    if heads_only and phase in ("2", "3"):
        raise BadInput(f"--heads-only has no phase {phase}", hint="heads alone are trained in phase 1")
    given = _given(config, {"model": model, "out": out, "device": device}, settings=settings or [])
    first = int(os.environ.get("RANK", "0")) == 0
    from flatout.api import adapt as run

    try:
        with _progress(first) as (on_line, on_note):
            outcome = run(
                given,
                phases=("phase1",) if heads_only else PHASES[phase],
                resume=resume,
                heads_only=heads_only,
                on_line=on_line,
                on_progress=on_note,
            )
    except Interrupted as interrupt:
        if not first:
            raise typer.Exit(interrupt.exit_code) from None
        raise
    if first:
        _answer_train(outcome, json_output=json_output)


@adapt.command()
def status(run: Run, json_output: AsJson = False) -> None:
    """Say how far each phase of a run is, and its best scores on rows held out.

    A phase is going on while the process that trains it lives; of an interrupted one the command that goes
    on with it is said.

    \b
    Examples:
      flatout adapt status runs/five
      flatout adapt status runs/five --json
    """
    from flatout.engines.adapters.verbs import status as read

    found = read(run)
    if json_output:
        _print_json("flatout-adapters-status", found)
        return
    _show_status(found)


@adapt.command()
def evaluate(
    run: Run,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; by default DIR/report.html.")
    ] = None,
    model: Model = None,
    device: Device = None,
    rows: Annotated[
        int | None, typer.Option(metavar="N", help="Rows per task; by default the config's.")
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="test, or validation to choose settings on.")
    ] = "test",
    top_k: TopK = None,
    threshold: Threshold = None,
    json_output: AsJson = False,
) -> None:
    """Score a run on rows held out: oracle, routed, single adapter, uniform mix and random routing.

    DIR gets evaluation.json and report.html. A run in DIR/heads-only stands beside it for comparison.

    \b
    Examples:
      flatout adapt evaluate runs/five
      flatout adapt evaluate runs/five --rows 200 --html five.html --json
      flatout adapt evaluate runs/five --split validation --top-k 1     one adapter per row: is that better?
    """
    from flatout.engines.adapters.verbs import evaluate as run_evaluation

    with _progress(True) as (_, on_note):
        found, page = run_evaluation(
            run,
            model=model,
            device=device,
            rows=rows,
            split=split,
            top_k=top_k,
            threshold=threshold,
            html=html,
            on_note=on_note,
        )
    if json_output:
        _print_json("flatout-adapters-evaluation", found)
        return
    _show_evaluation(found, page)


@adapt.command()
def predict(
    run: Run,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text; without it, lines of stdin.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What a question is about: the answer is a span of it.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="Take this task, not the router's.")
    ] = None,
    model: Model = None,
    device: Device = None,
    top_k: TopK = None,
    threshold: Threshold = None,
    json_output: AsJson = False,
) -> None:
    """Answer a text: the router picks the task, its adapter and head give the answer.

    \b
    Examples:
      flatout adapt predict runs/five "What a wonderful film."
      flatout adapt predict runs/five "Who wrote it?" --context "It was written by Ada." --json
      flatout adapt predict runs/five "Return the sum of two numbers." --task code
    """
    from flatout.engines.adapters.verbs import predict as answer
    from flatout.page.printable import printable

    lines = [text] if text is not None else sys.stdin.read().splitlines()
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise BadInput("no text is given", hint="as an argument, or as lines on stdin")
    answers = answer(
        run,
        texts,
        context=context,
        task=task,
        model=model,
        device=device,
        top_k=top_k,
        threshold=threshold,
    )
    if json_output:
        from flatout.codec import encode

        _write_json({"format": "flatout-adapters-predictions", "version": 1, "answers": encode(answers)})
        return
    for each in answers:
        written = printable(each.text, keep="\n\t")  # code has lines, and may hold terminal codes
        typer.echo(f"{each.task} ({show_share(each.confidence)}): {written}")


@adapt.command()
def export(
    run: Run,
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where a folder per adapter is written.")],
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one; may be repeated.")
    ] = None,
    model: Model = None,
    json_output: AsJson = False,
) -> None:
    """Write the adapters as folders that PEFT's `PeftModel.from_pretrained` loads.

    \b
    Examples:
      flatout adapt export runs/five --to peft/
      flatout adapt export runs/five --to peft/ --task qa
    """
    from flatout.engines.adapters.verbs import export as write

    folders = write(run, to=to, tasks=task, model=model)
    if json_output:
        _write_json({"format": "flatout-adapters-export", "version": 1, "folders": list(map(str, folders))})
        return
    for folder in folders:
        typer.echo(folder)


def _given(config: Path, flags: dict[str, Any], *, settings: list[str]) -> dict[str, Any]:
    """What the user said, and nothing that they did not say."""
    from flatout.engines.adapters.run_folder import read_given
    from flatout.engines.adapters.settings import with_setting

    given = read_given(config)
    given |= {name: value for name, value in flags.items() if value is not None}
    for text in settings:
        key, value = _pair(text)
        given = with_setting(given, key, value)
    return given


def _pair(text: str) -> tuple[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    key, equals, value = text.partition("=")
    if not key or not equals:
        raise BadInput(f"--set {text!r} is no pair", hint="write --set KEY=VALUE")
    try:
        return key, YAML(typ="safe").load(value)
    except YAMLError:
        raise BadInput(
            f"--set {text!r} has a value that cannot be read", hint="quote it as in YAML"
        ) from None


@contextlib.contextmanager
def _progress(first: bool) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """(the live line, a note that stays): rewritten in place on a terminal, lines elsewhere, on stderr."""
    if not first:
        yield (lambda line: None), (lambda note: None)
        return
    if not sys.stderr.isatty():
        yield _say, _say
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("flatout: loading") as shown:
        yield (
            lambda line: shown.update(line.replace("[", r"\[")),
            lambda note: console.print(f"flatout: {note}", markup=False),
        )


def _say(message: str) -> None:
    typer.echo(f"flatout: {message}", err=True)


def _answer_train(outcome: Outcome, *, json_output: bool) -> None:
    if json_output:
        _print_json("flatout-adapters", outcome)
        return
    _show_status(outcome.status)
    for path in outcome.plots:
        typer.echo(f"plot  {path}")


def _show_status(found: Status) -> None:
    typer.echo(found.out)
    for phase in found.phases:
        took = f", {show_seconds(phase.elapsed_s)}" if phase.elapsed_s is not None else ""
        typer.echo(f"{phase.name}  {_how_far(phase)}{took}")
        for name, progress in phase.progress.items():
            scores = ", ".join(f"{key} {value:.4g}" for key, value in progress.scores.items())
            best = UNKNOWN if progress.best_step is None else f"best at step {progress.best_step}"
            left = "" if progress.done in (None, phase.step) else f", left at step {progress.done}"
            if left and progress.left_because is not None:
                left += f" because {progress.left_because}"
            typer.echo(f"  {name:<16}  {best}{left}{f': {scores}' if scores else ''}")
    if found.resume is not None:
        typer.echo(f"go on with  {found.resume}")


def _how_far(phase: PhaseStatus) -> str:
    """The last step that is known of, how it stands there, and what of it is kept."""
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
        values = [found.score(task, routing) for routing in ROUTINGS]
        if heads:
            values.append(found.heads_only_score(task))
        cells = "".join(f"{UNKNOWN if value is None else f'{value:.1f}':>12}" for value in values)
        typer.echo(f"{task:<18}{found.metrics[task]:<16}{cells}")
    if found.routing is not None:
        typer.echo(f"routing accuracy {show_share(found.routing.accuracy_share)}")
    for note in found.notes:
        typer.echo(note)
    typer.echo(f"report  {page}")


def _print_json(kind: str, value: object) -> None:
    from flatout.codec import encode

    _write_json({"format": kind, "version": 1, **encode(value)})


def _write_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
