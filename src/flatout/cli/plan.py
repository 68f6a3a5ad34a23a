"""`flatout plan`: what a training config does to a GPU, and a config that fits.

Everything is decided before anything is written: the report and the diff come first, `--apply` asks, and a
backup is made.  Exit codes: 0 an answer, 1 a config with a finding, 2 what could not be done, such as a job
that does not fit even at a batch of one.
"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.cli import flags
from flatout.cli.flags import flag, option, switch
from flatout.cli.output import FINDINGS, print_json, say
from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from flatout.planner.config.backups import Backup
    from flatout.planner.plan import ConfigFit, PlanOptions

plan = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

Conf = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML or JSON file, or a folder with config.yaml.")
]
Model = Annotated[
    str | None,
    flag("--model", "NAME", "pkg.module:build, a Hugging Face config folder or a LightningModule."),
]
GpuMemory = Annotated[
    str | None, flag("--gpu-memory", "SIZE", 'Plan for a GPU with this much memory: "24GB".')
]
Margin = Annotated[float, flag("--margin", "SHARE", "Let a step use this share of the free memory.")]
Ranks = Annotated[
    int | None, flag("--ranks", "N", "Processes that train together; the effective batch counts them all.")
]
Mapping = Annotated[
    Path | None,
    flag(
        "--mapping", "FILE", "Read where the knobs are from FILE; default: flatout-plan.toml beside CONFIG."
    ),
]
Knob = Annotated[
    list[str] | None,
    flag("--knob", "NAME=KEY", "Say where a knob is: batch_size=data_loader.batch_size; repeatable."),
]
Task = Annotated[
    str | None, flag("--task", "TASK", "Head for a Hugging Face config that names none: causal-lm, ...")
]
MakeBatch = Annotated[
    str | None,
    flag(
        "--make-batch", "NAME", "pkg.module:function that makes a batch, for a LightningModule that has none."
    ),
]
LengthsFile = Annotated[
    Path | None,
    flag("--lengths", "FILE", "Sequence lengths, one per line or 'length,count'; the longest decides."),
]
Native = Annotated[bool, switch("--native", "Let the GPU in this machine choose the kernels.")]
NoCache = Annotated[bool, switch("--no-cache", "Trace again, and store no trace.")]
ExpandableSegments = Annotated[
    bool | None,
    typer.Option(
        "--expandable-segments/--no-expandable-segments",
        help="Plan with or without expandable segments; default: as PYTORCH_ALLOC_CONF says.",
    ),
]


@plan.callback()
def about() -> None:
    """Predict the GPU memory of a training config, and make it fit.

    \b
    Examples:
      flatout plan show conf/                                     memory per stage, on the GPU of this machine
      flatout plan fit conf/ --model pkg.train:build --gpu A100-80GB
      flatout plan fit conf/ --model pkg.train:build --apply      show the diff, ask, and write it
      flatout plan undo conf/                                     revert the last --apply
    """


@plan.command()
def show(
    ctx: typer.Context,
    conf: Conf,
    model: Model = None,
    task: Task = None,
    make_batch: MakeBatch = None,
    gpu: flags.Gpu = None,
    gpu_memory: GpuMemory = None,
    margin: Margin = 0.85,
    ranks: Ranks = None,
    mapping: Mapping = None,
    knob: Knob = None,
    overrides: flags.Set = None,
    lengths: LengthsFile = None,
    expandable_segments: ExpandableSegments = None,
    native: Native = False,
    no_cache: NoCache = False,
    json_output: flags.Json = False,
) -> None:
    """Show a config's settings, its memory and its share of the device.

    Every stage of a curriculum has its own line.  Without --model, it shows only the settings and where they
    were found.

    \b
    Examples:
      flatout plan show conf/config.yaml
      flatout plan show conf/ --model pkg.train:build --gpu-memory 24GB
      flatout plan show conf/ --model pkg.train:build --gpu "RTX 4090" --set model.lora.r=16
      flatout plan show args.json --model ./bert-config --task masked-lm --lengths lengths.txt
      flatout plan show cli.yaml --model pkg.model:Lit --make-batch pkg.data:make_batch --json

    Exit codes: 0 no findings, 1 a stage does not fit or leaves the device under-used, 2 flatout could not
    do its work, 130 interrupted.
    """
    from flatout.api import plan_config

    options = _options(ctx)
    with redirect_stdout(sys.stderr):  # what the model's own code prints is not part of the answer
        planned = plan_config(conf, options)
    if json_output:
        print_json(planned.to_json(), default=str)
    else:
        from flatout.cli.render.plan import render_overview

        sys.stdout.write(render_overview(planned))
    raise typer.Exit(FINDINGS if planned.overview.has_findings else 0)


@plan.command()
def fit(
    ctx: typer.Context,
    conf: Conf,
    model: Model = None,
    task: Task = None,
    make_batch: MakeBatch = None,
    gpu: flags.Gpu = None,
    gpu_memory: GpuMemory = None,
    margin: Margin = 0.85,
    profile: Annotated[
        bool, switch("--profile", "Run short real steps on the GPU, and correct the estimate.")
    ] = False,
    effective: int | None = option("--effective", "N", "Change the effective batch to N; default: keep it."),
    allow: list[str] | None = option(
        "--allow", "KNOB", "Let a knob change: checkpointing, eval_batch_size, n_negatives; repeatable."
    ),
    choose: str | None = option(
        "--choose", "NAME", 'Choose the suggestion to write: "safest", "fastest", ...'
    ),
    apply: Annotated[
        bool, switch("--apply", "Show the diff, then write the suggestion into the config.")
    ] = False,
    yes: flags.Yes = False,
    ranks: Ranks = None,
    mapping: Mapping = None,
    knob: Knob = None,
    overrides: flags.Set = None,
    lengths: LengthsFile = None,
    expandable_segments: ExpandableSegments = None,
    native: Native = False,
    no_cache: NoCache = False,
    json_output: flags.Json = False,
) -> None:
    """Find the largest batch that fits, and keep the effective batch.

    A batch fits if it trains within the margin; accumulation keeps the effective batch.  The most demanding
    stage of a curriculum decides. The learning rate, negatives and the effective batch are part of the
    objective and change only on request. --apply changes only the characters of the values and keeps a
    backup, which flatout plan undo restores.

    \b
    Examples:
      flatout plan fit conf/ --model pkg.train:build
      flatout plan fit conf/ --model pkg.train:build --gpu-memory 24GB --margin 0.9
      flatout plan fit conf/ --model pkg.train:build --gpu A100-80GB --choose safest --apply --yes
      flatout plan fit conf/ --model pkg.train:build --profile           on a machine with a GPU
      flatout plan fit args.json --model ./llama-config --effective 512 --ranks 8
      flatout plan fit args.json --model ./bert-config --lengths lengths.txt --allow eval_batch_size

    Exit codes: 0 it fits, 2 it cannot be made to fit or flatout could not do its work, 130 interrupted.
    """
    from flatout.api import fit_config

    _check_apply(apply=apply, yes=yes, json_output=json_output)
    options = _options(ctx)
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
        kept = "" if no_cache else ", and traces so far are kept"
        raise KeyboardInterrupt(f"interrupted: nothing was written{kept}") from None
    if json_output:
        backup = _write(fitted) if apply else None
        backup_folder = None if backup is None else str(backup.folder)
        print_json({**fitted.to_json(), "backup": backup_folder}, default=str)
        return
    from flatout.cli.render.plan import render_fit

    sys.stdout.write(render_fit(fitted))
    if apply:
        _apply(fitted, yes=yes)


@plan.command()
def undo(
    conf: Conf,
    force: Annotated[
        bool,
        switch("--force", "Also restore files that were changed since; keep the changed versions aside."),
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


def _options(ctx: typer.Context) -> PlanOptions:
    """Collect what `show` and `fit` share; prepare the libraries that a model may import."""
    from flatout.planner.plan import PlanOptions

    # Advice about a model's config is for those who run it.  A library that asks CUDA itself as it is
    # imported leaves this process unable to fork one that uses the GPU, so it asks the driver.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    given = ctx.params
    same = ("model", "task", "make_batch", "gpu", "gpu_memory", "margin", "ranks", "lengths", "native")
    return PlanOptions(
        **{name: given[name] for name in same},
        mapping_file=given["mapping"],
        knobs=tuple(given["knob"] or ()),
        overrides=tuple(given["overrides"] or ()),
        expandable_segments=given["expandable_segments"],
        cache=not given["no_cache"],
        profile=given.get("profile", False),
        on_progress=say,
    )


def _check_apply(*, apply: bool, yes: bool, json_output: bool) -> None:
    if yes and not apply:
        raise BadInput("--yes has no effect without --apply", hint="add --apply")
    if apply and not yes and (json_output or not can_ask()):
        raise BadInput(
            "--apply asks before it writes, but there is no terminal to answer on", hint="add --yes"
        )


def can_ask() -> bool:
    return sys.stdin.isatty()


def _apply(fitted: ConfigFit, *, yes: bool) -> None:
    if not fitted.edits:
        say(f"nothing to change: {fitted.opened.config.path} already matches the plan")
        return
    try:
        wanted = yes or typer.confirm(
            f"Write {', '.join(edit.path.name for edit in fitted.edits)}?", err=True
        )
    except typer.Abort:
        raise KeyboardInterrupt("interrupted: nothing was written") from None
    if not wanted:
        say("nothing was written")
        return
    _write(fitted)


def _write(fitted: ConfigFit) -> Backup | None:
    from flatout.api import apply_config

    backup = apply_config(fitted)
    if backup is not None:
        names = ", ".join(saved.path for saved in backup.files)
        conf = shlex.quote(str(fitted.opened.config.path))
        say(f"wrote {names}; flatout plan undo {conf} reverts it")
    return backup
