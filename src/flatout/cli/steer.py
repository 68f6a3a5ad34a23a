"""`flatout steer`: from contrastive questions to a steering vector that was tested on unused questions.

`search` does the whole of it; `extract` and `fit` are its first steps by themselves, `apply` shows a vector
at work, and `report` draws what a search found.  Results go to stdout, progress to stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.cli import flags
from flatout.cli.flags import flag, option, switch
from flatout.cli.output import print_document, say_written
from flatout.cli.render.progress import counting, searching
from flatout.ground.errors import BadInput
from flatout.ground.units import UNKNOWN, show_bytes, show_seconds

if TYPE_CHECKING:
    from flatout.engines.steering.report.record import StudyRecord

steer = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

Questions = Annotated[
    str, typer.Argument(metavar="QUESTIONS", help="JSON lines, each with a question and its two answers.")
]
Model = Annotated[
    str | None,
    flag("--model", "FOLDER", "A causal language model with its tokenizer, or OWNER/NAME on the Hub."),
]
Layers = Annotated[str | None, flag("--layers", "LIST", "Layers, from 0: all (default), 4-20 or 3,5,8-10.")]
Position = Annotated[
    str | None,
    flag("--position", "PLACE", "The token that represents a text: last (default), mean, -2, 3:8."),
]
Store = Annotated[str, flag("--store", "DIR", "Keep activations in this folder, by content.")]
Methods = Annotated[
    list[str] | None,
    flag("--method", "NAME", "Fit by mean-difference, pca, logistic, lda or random; repeatable."),
]
DEFAULT_STORE = ".flatout/activations"
NEW_LINE = "\n"


@steer.callback()
def about() -> None:
    """Find the vector that steers a language model.

    A search tries layers, directions and strengths, hundreds of trials in one batch.

    \b
    Examples:
      flatout steer search --model ./smollm2 --questions sycophancy.jsonl --trials 200 --out runs/syc
      flatout steer report runs/syc --html syc.html --png syc.png
      flatout steer apply "Is my poem any good?" --model ./smollm2 --run runs/syc

    Each line of QUESTIONS is {"question": ..., "answer_matching_behavior": ...,
    "answer_not_matching_behavior": ...} or {"prompt": ..., "positive": ..., "negative": ...}.
    """


@steer.command()
def extract(
    ctx: typer.Context,
    questions: Questions,
    model: Model,
    layers: Layers = None,
    position: Position = None,
    store: Store = DEFAULT_STORE,
    store_limit: str | None = option("--store-limit", "SIZE", "Limit that folder to a size such as 20GB."),
    tiers: list[str] | None = option(
        "--tier",
        "DEVICE=SIZE",
        "Keep activations in memory too, such as cpu=8GiB; repeatable, fastest first.",
    ),
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    json_output: flags.Json = False,
) -> None:
    """Store the activations of both answers of every question.

    One pass extracts all layers.  The store is keyed by the content of weights, tokenizer and text, and
    nothing in it is computed again. The second line of the output says after how many uses storing beats
    computing, from times measured here.

    \b
    Examples:
      flatout steer extract sycophancy.jsonl --model ./smollm2
      flatout steer extract sycophancy.jsonl --model ./smollm2 --layers 8-20 --position -2
      flatout steer extract sycophancy.jsonl --model ./smollm2 --tier cpu=8GiB --store-limit 50GB
    """
    import flatout.api as api

    with counting("texts") as on_count:
        done = api.steer_extract(flags.collect(ctx), on_count=on_count)
    if json_output:
        print_document("flatout-steering-extraction", done)
        return
    rate = done.num_texts / done.seconds if done.seconds > 0 else 0.0
    typer.echo(
        f"{done.num_texts} texts x {len(done.layers)} layers x {done.width} in {show_seconds(done.seconds)}"
        f" ({rate:.0f} texts/s), kept in {done.store}"
    )
    typer.echo(f"store  {done.break_even or f'{done.num_read} distinct texts were already stored'}")
    for tier in done.tiers:
        held, most = show_bytes(tier.held_bytes), show_bytes(tier.budget_bytes)
        typer.echo(f"tier   {tier.device} holds {held} of {most}")


@steer.command()
def fit(
    ctx: typer.Context,
    questions: Questions,
    model: Model,
    out: flags.Out,
    methods: Methods = None,
    layers: Layers = None,
    position: Position = None,
    whole: Annotated[
        bool, switch("--whole", "Fit on every question, not only on the half that a search fits on.")
    ] = False,
    store: Store = DEFAULT_STORE,
    seed: flags.Seed = None,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    json_output: flags.Json = False,
) -> None:
    """Fit a direction for every layer, by one or more methods.

    All methods use one extraction.  Without --whole, only the half that `search` fits on is used, so its test
    questions stay unseen. DIR gets one METHOD.safetensors per method.

    \b
    Examples:
      flatout steer fit sycophancy.jsonl --model ./smollm2 --out vectors/syc
      flatout steer fit pairs.jsonl --model ./M --out v --method pca --method lda --layers 8-20
    """
    import flatout.api as api

    given = flags.collect(ctx, apart=["out", "whole"]) | {"vectors": out}
    with counting("texts") as on_count:
        fitted = api.steer_fit(given, whole=whole, on_count=on_count)
    if json_output:
        print_document("flatout-steering-vectors", methods=fitted)
        return
    for one in fitted:
        typer.echo(
            f"{one.method:<16}  {len(one.layers)} layers, residual norm {min(one.norms):.3g} to"
            f" {max(one.norms):.3g}  {one.path}"
        )


@steer.command()
def search(
    ctx: typer.Context,
    config: flags.Config = None,
    model: Model = None,
    questions: str | None = option(
        "--questions", "FILE", "JSON lines, each with a question and its two answers."
    ),
    out: flags.Out = None,
    vectors: str | None = option("--vectors", "DIR", "Use vectors that `fit` wrote; default: fit them here."),
    methods: Methods = None,
    layers: Layers = None,
    position: Position = None,
    strength: str | None = option("--strength", "LOW:HIGH", "Range, in mean residual norms of the layer."),
    where: list[str] | None = option(
        "--where", "PLACE", "Steer last-and-generated (default), all or generated tokens; repeatable."
    ),
    modes: list[str] | None = option(
        "--mode", "NAME", "Mode: add (default), project-out, clamp or norm-preserving; repeatable."
    ),
    spans: list[int] | None = option("--span", "N", "Steer N layers at once; repeatable."),
    sampler: str | None = option(
        "--sampler", "NAME", "Propose trials by tpe (default), random, grid or cmaes."
    ),
    toward: str | None = option(
        "--toward", "ANSWER", "Make the positive (default) or the negative answer likelier."
    ),
    score: str | None = option(
        "--score", "TOKENS", "Tokens of an answer that count: whole (default), decisive or first-token."
    ),
    judge: str | None = option(
        "--judge", "MODULE:FUNCTION", "Score generated texts with f(question, text); larger is better."
    ),
    max_new_tokens: int | None = option("--max-new-tokens", "N", "Longest judged or shown text, in tokens."),
    trials: int | None = option("--trials", "N", "Configurations to try, over all workers."),
    rungs: int | None = option("--rungs", "N", "Rungs of successive halving; 1: never prune."),
    rows: int | None = option("--rows", "N", "(trial, question) rows per batch."),
    seed: flags.Seed = None,
    neutral: str | None = option("--neutral", "FILE", "Texts for the side-effect check, one per line."),
    storage: str | None = option(
        "--storage",
        "URL",
        "Keep the study at postgresql://... or grpc://host:port; default: a journal in DIR.",
    ),
    study: str | None = option("--study", "NAME", "Name of the study in the storage."),
    workers: int | None = option("--workers", "N", "Number of workers; default: one per GPU."),
    ray: str | None = option("--ray", "ADDRESS", "Run further workers on a Ray cluster: auto or HOST:PORT."),
    join: Annotated[
        bool, switch("--join", "Only add a worker to a search that another process started.")
    ] = False,
    worker: str | None = option("--worker", "NAME", "Name of the joining worker; default: HOST-PID."),
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    resume: flags.Resume = False,
    settings: flags.Set = None,
    json_output: flags.Json = False,
) -> None:
    """Search layer, method and strength, and test the winner.

    The test uses fresh questions and neutral text.  Half of the questions fit the vectors, a quarter is for
    the search and a quarter for the test. Trials share batched forwards, and poor ones end early. After a
    kill or an interrupt, the same command continues. DIR gets the study, result.json, report.html and
    report.png.

    \b
    Examples:
      flatout steer search --model ./smollm2 --questions syc.jsonl --trials 200 --out runs/syc
      flatout steer search runs/syc.yaml --strength -0.5:0.5 --layers 8-20
      flatout steer search runs/syc.yaml --mode add --mode clamp --span 1 --span 4 --sampler random
      flatout steer search --out runs/syc --resume --trials 400  continue with more trials
      flatout steer search runs/syc --join                       add a worker, here or elsewhere
      flatout steer search syc.yaml --judge my_judges:is_polite --max-new-tokens 64
      flatout steer search syc.yaml --storage postgresql://user@host/db --workers 4
      flatout steer search syc.yaml --ray auto --workers 8       add eight workers on a cluster

    Exit codes: 0 done, 2 flatout could not do its work, 130 interrupted (every answer is kept).
    """
    import flatout.api as api

    with searching() as (on_progress, on_event):
        done = api.steer(
            config or {},
            changes=flags.collect(ctx, apart=["join", "worker"]),
            resume=resume,
            join=join,
            worker=worker,
            on_progress=on_progress,
            on_event=on_event,
        )
    if done.record is not None:
        _answer(done.record, Path(done.out), json_output=json_output)


@steer.command()
def apply(
    ctx: typer.Context,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Texts to continue.")],
    model: str | None = option("--model", "FOLDER", "A model and its tokenizer; default: the run's."),
    run: str | None = option("--run", "RUN", "Use the winner of this search."),
    vectors: Path | None = option(
        "--vectors", "FILE", "Use these (.safetensors, .gguf), with --layer and --strength."
    ),
    layer: int | None = option("--layer", "N", "Steer this layer, counted from 0."),
    strength: float | None = option(
        "--strength", "X", "Strength, in mean residual norms of the layer; may be negative."
    ),
    mode: str | None = option(
        "--mode", "NAME", "Mode: add (default), project-out, clamp or norm-preserving."
    ),
    span: int | None = option("--span", "N", "Steer N layers at once, starting at --layer."),
    where: str | None = option(
        "--where", "PLACE", "Steer last-and-generated (default), all or generated tokens."
    ),
    max_new_tokens: Annotated[int, flag("--max-new-tokens", "N", "Longest continuation, in tokens.")] = 64,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    json_output: flags.Json = False,
) -> None:
    """Continue prompts greedily, with and without a steering vector.

    \b
    Examples:
      flatout steer apply "Is my poem any good?" --run runs/syc
      flatout steer apply "Hello." --model ./M --vectors v/pca.safetensors --layer 12 --strength -0.3
    """
    import flatout.api as api
    from flatout.page.printable import printable

    if max_new_tokens < 1:
        raise BadInput(f"--max-new-tokens {max_new_tokens} is too small", hint="give at least 1")
    examples = api.steer_apply(prompts, **flags.collect(ctx, apart=["prompts"]))
    if json_output:
        print_document("flatout-steering-examples", examples=examples)
        return
    for example in examples:
        typer.echo(f"prompt     {example.prompt}")
        for name in ("unsteered", "steered"):  # what a model writes may hold terminal codes
            typer.echo(f"{name:<9}  {printable(getattr(example, name), keep=NEW_LINE)}")
        typer.echo()


VectorsFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="Vectors: .safetensors or a .gguf control vector.")
]


@steer.command(name="import")
def import_vectors(
    source: VectorsFile,
    to: Annotated[Path, flag("--to", "FILE", "Write them to NAME.safetensors.")],
    json_output: flags.Json = False,
) -> None:
    """Convert vectors of other libraries to flatout's format.

    FILE is a vector of repeng or llama.cpp, or plain tensors named by layer.  Strength 1 adds a vector as it
    is in the file. A folder of imported vectors can be searched: NAME is their method. Pickles are refused,
    because they can run any code.

    \b
    Examples:
      flatout steer import happy.gguf --to vectors/happy.safetensors
      flatout steer search syc.yaml --vectors vectors --method happy --strength 0:2
    """
    _convert(source, to, json_output=json_output)


@steer.command(name="export")
def export_vectors(
    source: VectorsFile,
    to: Annotated[Path, flag("--to", "FILE", "Write them to a .gguf or .safetensors file.")],
    kind: Annotated[
        str, flag("--kind", "NAME", "Architecture to name in a GGUF file, such as llama.")
    ] = "unknown",
    json_output: flags.Json = False,
) -> None:
    """Write vectors as other libraries read them.

    A .gguf file is a control vector for repeng and llama.cpp. A .safetensors file holds one tensor per layer,
    layer.13, as the dict of steering-vectors does.

    \b
    Examples:
      flatout steer export runs/syc/vectors/pca.safetensors --to syc.gguf --kind llama
      flatout steer export runs/syc/vectors/pca.safetensors --to syc.safetensors
      llama-cli -m model.gguf --control-vector-scaled syc.gguf 0.2
    """
    _convert(source, to, kind=kind, plain=True, json_output=json_output)


def _convert(
    source: Path, to: Path, *, kind: str = "unknown", plain: bool = False, json_output: bool
) -> None:
    import flatout.api as api

    done = api.steer_convert(source, to=to, model=kind, plain=plain)
    if json_output:
        print_document("flatout-steering-vectors", done)
        return
    typer.echo(f"{done.method}: {len(done.layers)} layers x {done.width}  {done.path}")


@steer.command()
def report(
    run: flags.Run, html: flags.Html = None, png: flags.Png = None, json_output: flags.Json = False
) -> None:
    """Show what a search has found so far.

    The report has the winner, its test on fresh questions, and its side effects.

    \b
    Examples:
      flatout steer report runs/syc
      flatout steer report runs/syc --html syc.html --png syc.png
    """
    import flatout.api as api

    record = api.steer_report(run, html=html, png=png)
    say_written(html, png)
    _answer(record, None, json_output=json_output)


def _answer(record: StudyRecord, folder: Path | None, *, json_output: bool) -> None:
    if json_output:
        print_document("flatout-steering", record)
        return
    states = [
        f"{number} {state}"
        for state in ("complete", "pruned", "failed", "running")
        if (number := record.count(state))
    ]
    typer.echo(record.headline())
    typer.echo(f"trials      {len(record.trials)}: {', '.join(states) or UNKNOWN}")
    if record.retest is not None:
        typer.echo(f"unsteered   {record.retest.baseline.show(signed=False)}")
        typer.echo(f"steered     {record.retest.steered.show(signed=False)}")
        typer.echo(f"difference  {record.retest.difference.show()}")
    if record.perplexity_ratio is not None:
        ratio = record.perplexity_ratio.show(signed=False)
        typer.echo(f"perplexity  {ratio} times the unsteered model's")
    if folder is not None:
        typer.echo(f"report      {folder / 'report.html'}")
