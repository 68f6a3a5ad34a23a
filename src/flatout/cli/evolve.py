"""`flatout evolve`: train a language model by evolution strategies, the whole population in one forward.

Settings come from a YAML file, from flags, and from `--set KEY=VALUE` for those without a flag; what is given
later in this list wins.  Under torchrun every process runs this verb, and the first one speaks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.cli.pace import Pace
from flatout.errors import BadInput, Interrupted
from flatout.units import UNKNOWN, show_seconds, show_share

if TYPE_CHECKING:
    from flatout.engines.evolution.training.records import EpochRecord
    from flatout.engines.evolution.training.trainer import EvolveOutcome


def evolve(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A YAML file with settings.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A causal language model and its tokenizer.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="digit-copy, arithmetic, countdown, gsm8k, translation, or a .jsonl file."
        ),
    ] = None,
    task_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the task: length=3.")
    ] = None,
    population: Annotated[int | None, typer.Option(metavar="N", help="Members; an even number.")] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Rank of the noise.")] = None,
    sigma: Annotated[float | None, typer.Option(metavar="X", help="Deviation of the noise.")] = None,
    lr: Annotated[float | None, typer.Option(metavar="X", help="Learning rate.")] = None,
    optimizer: Annotated[str | None, typer.Option(metavar="NAME", help="sgd or adamw.")] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Updates to make.")] = None,
    prompts: Annotated[int | None, typer.Option(metavar="N", help="Prompts per epoch and member.")] = None,
    rows: Annotated[
        int | None, typer.Option(metavar="N", help="Rows of a batch; by default what fits.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Length of a completion; by default the task's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of noise and prompts.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="auto, cpu or cuda.")] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Where logs and checkpoints go.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in DIR, bit for bit.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Train a language model by evolution strategies (EGGROLL), the whole population in one forward.

    Members differ from the model by low-rank noise and answer the same prompts; those with better answers
    pull the weights their way. No gradient is taken, so the reward may be anything: an exact match, a number,
    a program's verdict. DIR gets log.jsonl, TensorBoard files, checkpoints, a plot and the trained model.

    \b
    Examples:
      flatout evolve --model ./SmolLM2-135M --task arithmetic --population 256 --out runs/sums
      flatout evolve runs/sums.yaml --sigma 0.002 --set evaluate_every=5
      flatout evolve --out runs/sums --resume --epochs 300
      torchrun --nproc_per_node 8 --max-restarts 3 -m flatout evolve runs/sums.yaml

    Exit codes: 0 trained, 2 flatout could not do its work, 130 interrupted; the last checkpoint is kept.
    """
    flags = {
        "model": model,
        "task": task,
        "population": population,
        "rank": rank,
        "sigma": sigma,
        "lr": lr,
        "optimizer": optimizer,
        "epochs": epochs,
        "prompts": prompts,
        "rows": rows,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "device": device,
        "out": out,
    }
    given = _given(config, flags, settings=settings or [], task_options=task_option or [])
    first = int(os.environ.get("RANK", "0")) == 0
    from flatout.api import evolve as run

    try:
        with _progress(first) as (on_epoch, on_note):
            outcome = run(given, resume=resume, on_epoch=on_epoch, on_progress=on_note)
    except Interrupted as interrupt:
        if not first:
            raise typer.Exit(interrupt.exit_code) from None
        raise
    if first:
        _answer(outcome, json_output=json_output)


def _given(
    config: Path | None, flags: dict[str, Any], *, settings: list[str], task_options: list[str]
) -> dict[str, Any]:
    """What the user said, and nothing that they did not say."""
    from flatout.engines.evolution.settings import read_settings

    given = {} if config is None else read_settings(config)
    given |= {name: value for name, value in flags.items() if value is not None}
    given |= dict(_pair(text, flag="--set") for text in settings)
    if task_options:
        options = dict(_pair(text, flag="--task-option") for text in task_options)
        kept = given.get("task_options") or {}
        # What is no table is refused with the rest of the config.
        given["task_options"] = {**kept, **options} if isinstance(kept, dict) else kept
    return given


def _pair(text: str, *, flag: str) -> tuple[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    key, equals, value = text.partition("=")
    if not key or not equals:
        raise BadInput(f"{flag} {text!r} is no pair", hint=f"write {flag} KEY=VALUE")
    try:
        return key, YAML(typ="safe").load(value)
    except YAMLError:
        raise BadInput(
            f"{flag} {text!r} has a value that cannot be read", hint="quote it as in YAML"
        ) from None


@contextlib.contextmanager
def _progress(first: bool) -> Iterator[tuple[Callable[[EpochRecord], None], Callable[[str], None]]]:
    """Epochs as a live line on a terminal, as lines elsewhere; always on stderr."""
    if not first:
        yield (lambda record: None), (lambda note: None)
        return
    pace = Pace("epochs")

    def told(record: EpochRecord) -> str:
        return describe(record, pace=pace.parts(record.epoch, record.epochs)[1:])

    if not sys.stderr.isatty():
        yield (lambda record: _say(told(record))), _say
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("flatout: loading") as status:
        yield (
            lambda record: status.update(told(record)),
            lambda note: console.print(f"flatout: {note}", markup=False),
        )


def describe(record: EpochRecord, *, pace: Sequence[str] = ()) -> str:
    """One epoch in one line; `pace` says how fast it goes, and about how long."""
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
        parts.append("all rewards equal, nothing to learn from: a larger --sigma, or --set chat=false")
    parts += [show_seconds(record.elapsed_s), *pace]
    return " · ".join(parts)


def _answer(outcome: EvolveOutcome, *, json_output: bool) -> None:
    from flatout.codec import encode

    if json_output:
        document = {"format": "flatout-evolution", "version": 1, **encode(outcome)}
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
        return

    def shown(score: float | None) -> str:
        return UNKNOWN if score is None else f"{score:.3f}"

    typer.echo(f"{outcome.epochs} epochs in {outcome.out}")
    typer.echo(f"held out  {shown(outcome.untrained_score)} untrained, {shown(outcome.score)} trained")
    for name, path in (("model", outcome.model), ("plot", outcome.plot)):
        if path is not None:
            typer.echo(f"{name:<8}  {path}")


def _say(message: str) -> None:
    typer.echo(f"flatout: {message}", err=True)
