"""`flatout plan`: what a training config does to a GPU, and a config that fits.

Everything is decided before anything is written: the report and the diff come first, `--apply` asks, and a
backup is made.  An answer ends with 0, a config with a finding with 1, and whatever could not be done,
a job that does not fit at a batch of one among it, with 2.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.errors import BadInput

if TYPE_CHECKING:
    from flatout.planner.config.backups import Backup, FileEdit
    from flatout.planner.plan import ConfigFit

FINDINGS = 1

plan = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)

Conf = Annotated[
    Path, typer.Argument(metavar="CONF", help="A YAML or JSON file, or a folder with config.yaml.")
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="pkg.module:build, a Hugging Face config folder, or a LightningModule."
    ),
]
Gpu = Annotated[
    str | None, typer.Option(metavar="NAME", help='A GPU that is not here: "A100-80GB", "RTX 4090".')
]
GpuMemory = Annotated[str | None, typer.Option(metavar="SIZE", help='A GPU of so much memory: "24GB".')]
Margin = Annotated[
    float, typer.Option(metavar="SHARE", help="How much of what is free a step has to make do with.")
]
Ranks = Annotated[
    int | None,
    typer.Option(metavar="N", help="Processes that train together; the effective batch counts all."),
]
Mapping = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Where the knobs live; by default flatout-plan.toml beside CONF."),
]
Knob = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=KEY", help="Where one knob lives: batch_size=data_loader.batch_size."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A value the job is started with; it is not written."),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="TASK",
        help="The head of a Hugging Face config that names none: causal-lm, masked-lm, ...",
    ),
]
MakeBatch = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="pkg.module:function that makes a batch, for a LightningModule without one."
    ),
]
LengthsFile = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        metavar="FILE",
        help="How long the sequences are, one a line or 'length,count': the longest decides.",
    ),
]
Native = Annotated[
    bool, typer.Option("--native", help="Let the GPU that is here choose the kernels of the traced step.")
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Trace afresh, and keep no trace for the next question.")
]
ExpandableSegments = Annotated[
    bool | None,
    typer.Option(
        "--expandable-segments/--no-expandable-segments",
        help="How the job's allocator is set; by default as PYTORCH_ALLOC_CONF says here.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@plan.callback()
def about() -> None:
    """What a training config needs of a GPU, and how to make it fit.

    \b
    Examples:
      flatout plan show conf/                                     what it does to the GPU of this machine
      flatout plan fit conf/ --model pkg.train:build --gpu A100-80GB
      flatout plan fit conf/ --model pkg.train:build --apply      write it, after showing the diff
      flatout plan undo conf/                                     take it back
    """


@plan.command()
def show(
    conf: Conf,
    model: Model = None,
    task: Task = None,
    make_batch: MakeBatch = None,
    gpu: Gpu = None,
    gpu_memory: GpuMemory = None,
    margin: Margin = 0.85,
    ranks: Ranks = None,
    mapping: Mapping = None,
    knob: Knob = None,
    overrides: Set = None,
    lengths: LengthsFile = None,
    expandable_segments: ExpandableSegments = None,
    native: Native = False,
    no_cache: NoCache = False,
    json_output: Json = False,
) -> None:
    """Show a config's settings, its memory per stage, and the share of the device it uses.

    Without a model there is no memory to show; the settings and where they were found are shown all the same.

    \b
    Examples:
      flatout plan show conf/config.yaml
      flatout plan show conf/ --model pkg.train:build --gpu-memory 24GB
      flatout plan show conf/ --model pkg.train:build --gpu "RTX 4090" --set model.lora.r=16
      flatout plan show args.json --model ./bert-config --task masked-lm --lengths lengths.txt
      flatout plan show cli.yaml --model pkg.model:Lit --make-batch pkg.data:make_batch --json

    Exit codes: 0 nothing to say, 1 a stage does not fit or leaves the device under-used, 2 flatout could not
    do its work, 130 interrupted.
    """
    from flatout.api import plan_config
    from flatout.planner.plan import PlanOptions

    _settle_libraries()
    options = PlanOptions(
        model=model,
        task=task,
        make_batch=make_batch,
        gpu=gpu,
        gpu_memory=gpu_memory,
        margin=margin,
        ranks=ranks,
        mapping_file=mapping,
        knobs=tuple(knob or ()),
        overrides=tuple(overrides or ()),
        lengths=lengths,
        expandable_segments=expandable_segments,
        native=native,
        cache=not no_cache,
        on_progress=_say,
    )
    with redirect_stdout(sys.stderr):  # what the model's own code prints is no part of the answer
        planned = plan_config(conf, options)
    if json_output:
        _print_document(planned.to_json())
    else:
        from flatout.cli.render_plan import render_overview

        sys.stdout.write(render_overview(planned))
    raise typer.Exit(FINDINGS if planned.overview.has_findings else 0)


@plan.command()
def fit(
    conf: Conf,
    model: Model = None,
    task: Task = None,
    make_batch: MakeBatch = None,
    gpu: Gpu = None,
    gpu_memory: GpuMemory = None,
    margin: Margin = 0.85,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run a short real step on the GPU and correct the estimate.")
    ] = False,
    effective: Annotated[
        int | None, typer.Option(metavar="N", help="Change the effective batch to N; otherwise it is kept.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KNOB", help="A knob that may change: checkpointing, eval_batch_size, n_negatives."
        ),
    ] = None,
    choose: Annotated[
        str | None, typer.Option(metavar="NAME", help='Which suggestion to write: "safest", "fastest", ...')
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Write it into the config, after the diff.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before writing.")] = False,
    ranks: Ranks = None,
    mapping: Mapping = None,
    knob: Knob = None,
    overrides: Set = None,
    lengths: LengthsFile = None,
    expandable_segments: ExpandableSegments = None,
    native: Native = False,
    no_cache: NoCache = False,
    json_output: Json = False,
) -> None:
    """Find the largest batch that trains within the margin, and keep the effective batch with accumulation.

    The worst stage of a curriculum decides. The learning rate, negatives and the effective batch are part of
    the objective and stay unless asked for. --apply changes only the characters of the values and keeps a
    backup that flatout plan undo restores.

    \b
    Examples:
      flatout plan fit conf/ --model pkg.train:build
      flatout plan fit conf/ --model pkg.train:build --gpu-memory 24GB --margin 0.9
      flatout plan fit conf/ --model pkg.train:build --gpu A100-80GB --choose safest --apply --yes
      flatout plan fit conf/ --model pkg.train:build --profile           on a GPU that is here
      flatout plan fit args.json --model ./llama-config --effective 512 --ranks 8
      flatout plan fit args.json --model ./bert-config --lengths lengths.txt --allow eval_batch_size

    Exit codes: 0 it fits, 2 it cannot be made to fit or flatout could not do its work, 130 interrupted.
    """
    from flatout.api import fit_config
    from flatout.planner.plan import PlanOptions

    _check_apply(apply=apply, yes=yes, json_output=json_output)
    _settle_libraries()
    options = PlanOptions(
        model=model,
        task=task,
        make_batch=make_batch,
        gpu=gpu,
        gpu_memory=gpu_memory,
        margin=margin,
        ranks=ranks,
        mapping_file=mapping,
        knobs=tuple(knob or ()),
        overrides=tuple(overrides or ()),
        lengths=lengths,
        expandable_segments=expandable_segments,
        native=native,
        cache=not no_cache,
        profile=profile,
        on_progress=_say,
    )
    try:
        with redirect_stdout(sys.stderr):
            fitted = fit_config(
                conf,
                options,
                effective_batch=effective,
                allow=tuple(allow or ()),
                choose=choose,
                to_apply=apply,
            )
    except KeyboardInterrupt:
        kept = "" if no_cache else ", and what was traced is kept"
        raise KeyboardInterrupt(f"interrupted: nothing was written{kept}") from None
    edits, unwritable = _edits(fitted, needed=apply)
    if json_output:
        backup = _write(fitted) if apply else None
        _print_document(_fit_document(fitted, edits, unwritable=unwritable, backup=backup))
        return
    from flatout.cli.render_plan import render_fit

    sys.stdout.write(render_fit(fitted, edits, unwritable=unwritable))
    if apply:
        _apply(fitted, edits, yes=yes)


@plan.command()
def undo(
    conf: Conf,
    force: Annotated[
        bool, typer.Option("--force", help="Restore also files that were changed since; they are kept aside.")
    ] = False,
) -> None:
    """Restore the files that the last --apply changed, byte for byte.

    \b
    Examples:
      flatout plan undo conf/
      flatout plan undo conf/config.yaml --force
    """
    from flatout.api import undo_config

    backup = undo_config(conf, force=force)
    names = ", ".join(saved.path for saved in backup.files)
    typer.echo(f"restored {names} from {backup.folder}")


def _check_apply(*, apply: bool, yes: bool, json_output: bool) -> None:
    if yes and not apply:
        raise BadInput("--yes answers the question of --apply, which is not given", hint="add --apply")
    if apply and not yes and (json_output or not somebody_answers()):
        raise BadInput("--apply asks before it writes, and nobody can answer here", hint="add --yes")


def somebody_answers() -> bool:
    return sys.stdin.isatty()


def _edits(fitted: ConfigFit, *, needed: bool) -> tuple[tuple[FileEdit, ...], str | None]:
    """What would be written; where there is no place for it, a report is still worth having."""
    try:
        return fitted.edits(), None
    except BadInput as error:
        if needed:
            raise
        return (), str(error)


def _apply(fitted: ConfigFit, edits: tuple[FileEdit, ...], *, yes: bool) -> None:
    if not edits:
        _say(f"nothing to change: {fitted.opened.config.path} already is as planned")
        return
    try:
        wanted = yes or typer.confirm(f"Write {', '.join(edit.path.name for edit in edits)}?", err=True)
    except typer.Abort:
        raise KeyboardInterrupt("interrupted: nothing was written") from None
    if not wanted:
        _say("nothing was written")
        return
    _write(fitted)


def _write(fitted: ConfigFit) -> Backup | None:
    from flatout.api import apply_config

    backup = apply_config(fitted)
    if backup is not None:
        names = ", ".join(saved.path for saved in backup.files)
        conf = shlex.quote(str(fitted.opened.config.path))
        _say(f"wrote {names}; flatout plan undo {conf} takes it back")
    return backup


def _fit_document(
    fitted: ConfigFit, edits: tuple[FileEdit, ...], *, unwritable: str | None, backup: Backup | None
) -> dict[str, Any]:
    from flatout.planner.config.backups import show_diff

    return {
        **fitted.to_json(),
        "diff": show_diff(edits, root=fitted.opened.config.root),
        "warnings": [warning for edit in edits for warning in edit.warnings],
        "unwritable": unwritable,
        "backup": None if backup is None else str(backup.folder),
    }


def _settle_libraries() -> None:
    """Advice about a model's config is for those who run it; and who looks for a GPU asks the driver.

    A library that asks CUDA itself as it is imported leaves this process unable to fork one that uses it.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def _print_document(document: dict[str, Any]) -> None:
    """Paths are the only values of a plan that JSON does not know."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False, default=str) + "\n")


def _say(message: str) -> None:
    typer.echo(f"flatout: {message}", err=True)
