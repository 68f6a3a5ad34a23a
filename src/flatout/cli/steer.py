"""`flatout steer`: from contrastive questions to a steering vector that was tested on questions nobody used.

`search` does the whole of it; `extract` and `fit` are its first steps by themselves, `apply` shows a vector
at work, and `report` draws what a search found.  Results go to stdout, progress to stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatout.errors import BadInput
from flatout.units import UNKNOWN, show_seconds

if TYPE_CHECKING:
    from flatout.engines.steering.report.record import StudyRecord

NEW_LINE = "\n"

steer = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)

Questions = Annotated[
    Path, typer.Argument(metavar="QUESTIONS", help="JSON lines: a question and its two answers on each.")
]
Model = Annotated[Path, typer.Option(metavar="FOLDER", help="A causal language model and its tokenizer.")]
Layers = Annotated[str, typer.Option(metavar="LIST", help="all, 4-20 or 3,5,8-10; layers count from 0.")]
Position = Annotated[
    str, typer.Option(metavar="PLACE", help="The token that stands for a text: last, mean, -2, 3:8.")
]
Store = Annotated[Path, typer.Option(metavar="DIR", help="Where activations are kept, by their content.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method", metavar="NAME", help="mean-difference, pca, logistic, lda or random; may be repeated."
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DEFAULT_STORE = Path(".flatout/activations")


@steer.callback()
def about() -> None:
    """Find the layer, direction and strength that steer a language model, hundreds of trials in one batch.

    \b
    Examples:
      flatout steer search --model ./SmolLM2-135M --questions sycophancy.jsonl --trials 200 --out runs/syc
      flatout steer report runs/syc --html syc.html --png syc.png
      flatout steer apply "Is my poem any good?" --model ./SmolLM2-135M --run runs/syc

    A line of QUESTIONS is {"question": ..., "answer_matching_behavior": ...,
    "answer_not_matching_behavior": ...} or {"prompt": ..., "positive": ..., "negative": ...}.
    """


@steer.command()
def extract(
    questions: Questions,
    model: Model,
    layers: Layers = "all",
    position: Position = "last",
    store: Store = DEFAULT_STORE,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json_output: AsJson = False,
) -> None:
    """Keep the activations of every question's two answers, all layers from one pass.

    What the store already has is not computed again: its key is the content of weights, tokenizer and text.

    \b
    Examples:
      flatout steer extract sycophancy.jsonl --model ./SmolLM2-135M
      flatout steer extract sycophancy.jsonl --model ./SmolLM2-135M --layers 8-20 --position -2
    """
    from flatout.cli.steer_progress import counting
    from flatout.engines.steering.settings import make_settings
    from flatout.engines.steering.verbs import extract as run

    given = {
        "model": str(model),
        "questions": str(questions),
        "layers": layers,
        "position": position,
        "store": str(store),
        "device": device,
        "dtype": dtype,
    }
    with counting("texts") as on_progress:
        done = run(make_settings(given), on_progress=on_progress)
    if json_output:
        _print_json("flatout-steering-extraction", done)
        return
    rate = done.num_texts / done.seconds if done.seconds > 0 else 0.0
    typer.echo(
        f"{done.num_texts} texts x {len(done.layers)} layers x {done.width} in {show_seconds(done.seconds)}"
        f" ({rate:.0f} texts/s), kept in {done.store}"
    )


@steer.command()
def fit(
    questions: Questions,
    model: Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where METHOD.safetensors are written.")],
    method: Methods = None,
    layers: Layers = "all",
    position: Position = "last",
    whole: Annotated[
        bool, typer.Option("--whole", help="Fit on every question, not on the share a search fits on.")
    ] = False,
    store: Store = DEFAULT_STORE,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the split.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json_output: AsJson = False,
) -> None:
    """Fit a direction for every layer, by one or more methods, from one extraction.

    Without --whole only the half that `search` fits on is used, so that no question of its test is seen.

    \b
    Examples:
      flatout steer fit sycophancy.jsonl --model ./SmolLM2-135M --out vectors/syc
      flatout steer fit pairs.jsonl --model ./M --out v --method pca --method lda --layers 8-20
    """
    from flatout.cli.steer_progress import counting
    from flatout.engines.steering.settings import make_settings
    from flatout.engines.steering.verbs import fit as run

    given: dict[str, Any] = {
        "model": str(model),
        "questions": str(questions),
        "vectors": str(out),
        "layers": layers,
        "position": position,
        "store": str(store),
        "seed": seed,
        "device": device,
        "dtype": dtype,
    }
    if method:
        given["methods"] = method
    with counting("texts") as on_progress:
        fitted = run(make_settings(given), whole=whole, on_progress=on_progress)
    if json_output:
        _print_json("flatout-steering-vectors", {"methods": fitted})
        return
    for one in fitted:
        typer.echo(
            f"{one.method:<16}  {len(one.layers)} layers, residual norm {min(one.norms):.3g} to"
            f" {max(one.norms):.3g}  {one.path}"
        )


@steer.command()
def search(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="A YAML file with settings, or the folder of a run.", show_default=False
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="FOLDER", help="A model and its tokenizer.")] = None,
    questions: Annotated[str | None, typer.Option(metavar="FILE", help="JSON lines of questions.")] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Where study and report go.")] = None,
    vectors: Annotated[
        str | None, typer.Option(metavar="DIR", help="What `fit` wrote; by default it is fitted here.")
    ] = None,
    method: Methods = None,
    layers: Annotated[str | None, typer.Option(metavar="LIST", help="all, 4-20 or 3,5,8-10.")] = None,
    position: Annotated[
        str | None, typer.Option(metavar="PLACE", help="Where a text is read: last, mean, -2, 3:8.")
    ] = None,
    strength: Annotated[
        str | None, typer.Option(metavar="LOW:HIGH", help="In mean residual norms of the layer.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="PLACE", help="last-and-generated, all or generated; may be repeated."),
    ] = None,
    toward: Annotated[
        str | None, typer.Option(metavar="ANSWER", help="Make the positive or the negative one likelier.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(metavar="N", help="Configurations to try, of all workers.")
    ] = None,
    rungs: Annotated[
        int | None, typer.Option(metavar="N", help="Of successive halving; 1 never prunes.")
    ] = None,
    rows: Annotated[int | None, typer.Option(metavar="N", help="(trial, question) rows of a batch.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of split and sampler.")] = None,
    neutral: Annotated[
        str | None, typer.Option(metavar="FILE", help="Texts for the side-effect check, one per line.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="postgresql://... or grpc://host:port; by default a journal in DIR."
        ),
    ] = None,
    study: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the study in it.")] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Replicas; by default one for each GPU.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run the further workers on a Ray cluster: auto.")
    ] = None,
    join: Annotated[
        bool, typer.Option("--join", help="Only add a worker to a search that another process began.")
    ] = False,
    worker: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the joining worker; by default HOST-PID.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="auto, cpu or cuda.")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.")
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Search layer, method and strength; test the winner on fresh questions and on neutral text.

    Half of the questions fit the vectors, a quarter is searched on, a quarter is kept for the test. Trials
    share batched forwards and poor ones end early. Killed or interrupted, the same command goes on. DIR gets
    the study, result.json, report.html and report.png.

    \b
    Examples:
      flatout steer search --model ./SmolLM2-135M --questions syc.jsonl --trials 200 --out runs/syc
      flatout steer search runs/syc.yaml --strength -0.5:0.5 --layers 8-20
      flatout steer search --out runs/syc --trials 400           go on, with more trials
      flatout steer search runs/syc --join                       one more worker, here or elsewhere
      flatout steer search syc.yaml --storage postgresql://user@host/db --workers 4

    Exit codes: 0 done, 2 flatout could not do its work, 130 interrupted; every finished row is kept.
    """
    from flatout.cli.steer_progress import searching
    from flatout.engines.steering.settings import number_range, read_file
    from flatout.engines.steering.verbs import search as run

    flags = {
        "model": model,
        "questions": questions,
        "out": out,
        "vectors": vectors,
        "methods": method or None,
        "layers": layers,
        "position": position,
        "strength": None if strength is None else number_range(strength),
        "where": where or None,
        "toward": toward,
        "trials": trials,
        "rungs": rungs,
        "rows": rows,
        "seed": seed,
        "neutral": neutral,
        "storage": storage,
        "study": study,
        "workers": workers,
        "ray": ray,
        "device": device,
        "dtype": dtype,
    }
    given = {} if config is None else read_file(config)
    given |= {name: value for name, value in flags.items() if value is not None}
    with searching() as (say, on_event):
        record = run(given, join=join, worker=worker, say=say, on_event=on_event)
    if record is not None:
        _answer(record, Path(given.get("out", "steering")), json_output=json_output)


@steer.command()
def apply(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Texts to continue.")],
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A model and its tokenizer; by default the run's.")
    ] = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Take the winner of this search.")] = None,
    vectors: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take these vectors, with --layer and --strength.")
    ] = None,
    layer: Annotated[int | None, typer.Option(metavar="N", help="The layer, from 0.")] = None,
    strength: Annotated[
        float | None, typer.Option(metavar="X", help="In mean residual norms of the layer; may be negative.")
    ] = None,
    mode: Annotated[
        str, typer.Option(metavar="NAME", help="add, project-out, clamp or norm-preserving.")
    ] = "add",
    where: Annotated[
        str | None, typer.Option(metavar="PLACE", help="last-and-generated, all or generated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Length of a continuation.")] = 64,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json_output: AsJson = False,
) -> None:
    """Continue prompts greedily, with and without a steering vector.

    \b
    Examples:
      flatout steer apply "Is my poem any good?" --run runs/syc
      flatout steer apply "Hello." --model ./M --vectors v/pca.safetensors --layer 12 --strength -0.3
    """
    from flatout.codec import encode
    from flatout.engines.steering.verbs import apply as run_apply
    from flatout.page.printable import printable

    if max_new_tokens < 1:
        raise BadInput(f"--max-new-tokens {max_new_tokens}", hint="take at least 1")
    examples = run_apply(
        prompts,
        model=model,
        run=run,
        vectors=vectors,
        layer=layer,
        strength=strength,
        mode=mode,
        where=where,
        max_new_tokens=max_new_tokens,
        device=device,
        dtype=dtype,
    )
    if json_output:
        _print_json("flatout-steering-examples", {"examples": encode(examples)})
        return
    for example in examples:
        typer.echo(f"prompt     {example.prompt}")
        for name in ("unsteered", "steered"):  # what a model writes may hold terminal codes
            typer.echo(f"{name:<9}  {printable(getattr(example, name), keep=NEW_LINE)}")
        typer.echo()


@steer.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a search, or its result.json.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page that needs nothing else.")
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture, .png or .svg.")] = None,
    json_output: AsJson = False,
) -> None:
    """Show what a search found: winner, test on fresh questions, side effects; a running one as far as it is.

    \b
    Examples:
      flatout steer report runs/syc
      flatout steer report runs/syc --html syc.html --png syc.png
    """
    from flatout.engines.steering.verbs import report as run_report

    record = run_report(run, html=html, png=png)
    for path in (html, png):
        if path is not None:
            typer.echo(f"flatout: written to {path}", err=True)
    _answer(record, None, json_output=json_output)


def _answer(record: StudyRecord, folder: Path | None, *, json_output: bool) -> None:
    if json_output:
        _print_json("flatout-steering", record)
        return
    from flatout.engines.steering.report.charts import show_interval
    from flatout.engines.steering.report.page import headline

    states = [
        f"{number} {state}"
        for state in ("complete", "pruned", "failed", "running")
        if (number := record.count(state))
    ]
    typer.echo(headline(record))
    typer.echo(f"trials      {len(record.trials)}: {', '.join(states) or UNKNOWN}")
    if record.retest is not None:
        typer.echo(f"unsteered   {show_interval(record.retest.baseline, signed=False)}")
        typer.echo(f"steered     {show_interval(record.retest.steered, signed=False)}")
        typer.echo(f"difference  {show_interval(record.retest.difference)}")
    if record.perplexity_ratio is not None:
        ratio = show_interval(record.perplexity_ratio, signed=False)
        typer.echo(f"perplexity  {ratio} times the unsteered model's")
    if folder is not None:
        typer.echo(f"report      {folder / 'report.html'}")


def _print_json(name: str, value: Any) -> None:
    from flatout.codec import encode

    document = {"format": name, "version": 1, **encode(value)}
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
