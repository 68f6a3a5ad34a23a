"""`flatout evolve`: train a language model by evolution strategies, the whole population in one forward.

Settings come from CONFIG, from flags, and from `--set KEY=VALUE` for those without a flag; what stands later
in this list wins.  Under torchrun every process runs this verb, and the first one speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import typer

from flatout.cli import flags
from flatout.cli.flags import option
from flatout.cli.output import FINDINGS, plain_console, plain_table, print_document
from flatout.cli.render.progress import OnText, Pace, launched_line, live_line
from flatout.ground.units import show, show_seconds, show_share

if TYPE_CHECKING:
    from flatout.engines.evolution.training.records import EpochRecord
    from flatout.engines.evolution.training.trainer import EvolveOutcome
    from flatout.engines.evolution.verify import Verification


def evolve(
    ctx: typer.Context,
    config: flags.Config = None,
    model: str | None = option(
        "--model", "FOLDER", "A causal language model with its tokenizer, or OWNER/NAME on the Hub."
    ),
    task: str | None = option(
        "--task",
        "NAME",
        "A .jsonl or .csv file, package.module:Class, or a name: digit-copy, arithmetic, countdown.",
    ),
    task_option: list[str] | None = option(
        "--task-option", "KEY=VALUE", "Set an option of the task, such as length=3; repeatable."
    ),
    population: int | None = option("--population", "N", "Number of members; must be even."),
    rank: int | None = option("--rank", "N", "Rank of the noise."),
    sigma: float | None = option("--sigma", "X", "Standard deviation of the noise."),
    lr: float | None = option("--lr", "X", "Learning rate."),
    optimizer: str | None = option("--optimizer", "NAME", "Optimizer: sgd or adamw."),
    epochs: int | None = option("--epochs", "N", "Number of updates."),
    prompts: int | None = option("--prompts", "N", "Prompts per epoch and member."),
    rows: int | None = option("--rows", "N", "Rows per batch; default: as many as fit."),
    max_new_tokens: int | None = option(
        "--max-new-tokens", "N", "Longest completion, in tokens; default: the task's."
    ),
    seed: flags.Seed = None,
    device: flags.Device = None,
    out: flags.Out = None,
    resume: flags.Resume = False,
    verify: bool = typer.Option(
        False, "--verify", help="Compare each optimisation with its plain form on this model; train nothing."
    ),
    settings: flags.Set = None,
    json_output: flags.Json = False,
) -> None:
    """Train a language model by evolution strategies (EGGROLL).

    The whole population runs in one forward.  Members differ from the model by low-rank noise and answer the
    same prompts; members with better answers pull the weights their way. No gradient is computed, so the
    reward can be anything: an exact match, a number, a program's verdict. DIR gets log.jsonl, TensorBoard
    files, checkpoints, a plot and the trained model.

    \b
    Examples:
      flatout evolve --model ./smollm2 --task arithmetic --set chat=false --out runs/sums
      flatout evolve runs/sums.yaml --sigma 0.002 --set evaluate_every=5
      flatout evolve --out runs/sums --resume --epochs 300
      flatout evolve runs/sums.yaml --verify
      torchrun --nproc_per_node 8 --max-restarts 3 -m flatout evolve runs/sums.yaml
      srun flatout evolve runs/sums.yaml --out /shared/sums

    Exit codes: 0 trained, 1 a check of --verify failed, 2 flatout could not do its work, 130 interrupted (the
    last checkpoint is kept).
    """
    changes = flags.collect(ctx, apart=["task_option", "verify"])
    for key, value in flags.pairs(task_option, flag="--task-option").items():
        changes[f"task_options.{key}"] = value
    import flatout.api as api

    if verify:
        with live_line() as (_, stay):
            found = api.verify_evolution(config or {}, changes=changes, on_progress=stay)
        _show_checks(found, json_output=json_output)
        raise typer.Exit(0 if found.holds else FINDINGS)
    with launched_line() as (first, update, on_progress):
        outcome = api.evolve(
            config or {}, changes=changes, resume=resume, on_event=_told(update), on_progress=on_progress
        )
    if first:
        _answer(outcome, json_output=json_output)


def _told(update: OnText) -> Callable[[EpochRecord], None]:
    pace = Pace("epochs")
    return lambda record: update(describe(record, pace=pace.parts(record.epoch, record.epochs)[1:]))


def describe(record: EpochRecord, *, pace: Sequence[str] = ()) -> str:
    """Describe one epoch in one line; `pace` says how fast it goes, and about how long."""
    parts = [f"epoch {record.epoch}" + (f" of {record.epochs}" if record.epochs is not None else "")]
    if record.reward_train is not None:
        parts.append(f"reward {record.reward_train:.3f}")
    if record.reward_heldout is not None:
        parts.append(f"held out {record.reward_heldout:.3f}")
    if record.tokens_per_s is not None and record.rewards_per_s is not None:
        parts.append(f"{record.rewards_per_s:.0f} rewards/s")
        parts.append(f"{record.tokens_per_s:.0f} tokens/s")
    if record.plain_share is not None:
        parts.append(f"{show_share(record.plain_share)} of plain inference")
    if record.failed_rows:
        parts.append(f"{record.failed_rows} rewards failed")
    if record.statistics.get("reward_std") == 0:
        parts.append(
            "all rewards are equal, so there is nothing to learn: try a larger --sigma, or --set chat=false"
        )
    parts += [show_seconds(record.elapsed_s), *pace]
    return " · ".join(parts)


def _show_checks(found: Verification, *, json_output: bool) -> None:
    if json_output:
        print_document("flatout-evolution-verification", found, holds=found.holds)
        return
    table = plain_table(
        "what is fast", "held beside", "differs by", "at most", "", right=("differs by", "at most")
    )
    for check in found.checks:
        figures = (f"{check.figure:.2g} {check.unit}", f"{check.limit:g}")
        table.add_row(check.name, check.against, *figures, "holds" if check.holds else "DIFFERS")
    plain_console().print(table)
    typer.echo(f"{found.model} on {found.device} in {found.dtype}")


def _answer(outcome: EvolveOutcome, *, json_output: bool) -> None:
    if json_output:
        print_document("flatout-evolution", outcome)
        return
    untrained, trained = (show(score, "{:.3f}") for score in (outcome.untrained_score, outcome.score))
    typer.echo(f"{outcome.epochs} epochs in {outcome.out}")
    typer.echo(f"held out  {untrained} untrained, {trained} trained")
    for name, path in (("model", outcome.model), ("plot", outcome.plot), ("report", outcome.report)):
        if path is not None:
            typer.echo(f"{name:<8}  {path}")
