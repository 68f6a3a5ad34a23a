"""What `flatout steer` does, verb by verb; the command line parses, calls these and prints."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engines.steering.loading import Opened, check_folder, open_model
from flatout.engines.steering.questions import read_questions
from flatout.engines.steering.report.page import page
from flatout.engines.steering.report.record import Example, StudyRecord, load_record
from flatout.engines.steering.search.run_search import (
    RECORD,
    join_search,
    opened_study,
    placed,
    run_search,
    split_of,
)
from flatout.engines.steering.settings import (
    FILE,
    SearchSettings,
    chosen_layers,
    make_settings,
    read_file,
    settled,
)
from flatout.engines.steering.vectors.fit_questions import (
    check_methods,
    extract_questions,
    fit_methods,
    save_vectors,
)
from flatout.errors import BadInput
from flatout.page.document import write_page

if TYPE_CHECKING:
    from flatout.engines.steering.search.halved_search import Event
    from flatout.engines.steering.vectors.steering_vectors import SteeringVectors

Say = Callable[[str], None]
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extracted:
    """What an extraction gave, and how."""

    num_texts: int
    layers: tuple[int, ...]
    width: int
    seconds: float
    store: str
    recipe: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Vectors of one method."""

    method: str
    path: str
    layers: tuple[int, ...]
    norms: tuple[float, ...]  # the mean length of the residual stream at each layer: what strength 1 adds


def extract(settings: SearchSettings, *, on_progress: OnProgress) -> Extracted:
    """Put the activations of every question's answers into the store."""
    check_folder(Path(settings.model))
    questions = read_questions(settings.questions)
    opened = _opened(settings)
    began_s = time.perf_counter()
    found = extract_questions(
        opened,
        questions,
        layers=chosen_layers(settings.layers),
        position=settings.position,
        store=settings.store_folder,
        on_progress=on_progress,
    )
    return Extracted(
        num_texts=len(found.keys),
        layers=found.layers,
        width=found.values.shape[2],
        seconds=time.perf_counter() - began_s,
        store=str(settings.store_folder),
        recipe=dict(found.recipe),
    )


def fit(settings: SearchSettings, *, whole: bool, on_progress: OnProgress) -> list[Fitted]:
    """Fit the vectors of every method on the questions to fit with, or on the whole file."""
    check_folder(Path(settings.model))
    check_methods(settings.methods)
    questions = read_questions(settings.questions) if whole else split_of(settings).train
    folder = settings.vectors_folder
    made = fit_methods(
        _opened(settings),
        questions,
        methods=settings.methods,
        layers=chosen_layers(settings.layers),
        position=settings.position,
        store=settings.store_folder,
        seed=settings.seed,
        on_progress=on_progress,
    )
    save_vectors(made, folder)
    return [
        Fitted(
            method=name,
            path=str(folder / f"{name}.safetensors"),
            layers=vectors.layers,
            norms=tuple(vectors.norms.tolist()),
        )
        for name, vectors in made.items()
    ]


def search(
    given: Mapping[str, Any],
    *,
    join: bool = False,
    worker: str | None = None,
    say: Say,
    on_event: Callable[[Event], None],
) -> StudyRecord | None:
    """Search and write the report beside the study; None for a worker that only joined one."""
    settings = make_settings(given) if join else settled(given)
    check_methods(settings.methods)
    if join:
        join_search(settings, worker=worker, say=say, on_event=on_event)
        return None
    record = run_search(settings, say=say, on_event=on_event)
    write_page(page(record), settings.folder / "report.html")
    if importlib.util.find_spec("matplotlib") is not None:
        from flatout.engines.steering.report.charts import plot_study

        plot_study(record, settings.folder / "report.png")
    return record


def apply(
    prompts: Sequence[str],
    *,
    model: Path | None = None,
    run: Path | None = None,
    vectors: Path | None = None,
    layer: int | None = None,
    strength: float | None = None,
    mode: Any = "add",
    where: Any = None,
    max_new_tokens: int = 64,
    device: str = "auto",
    dtype: Any = "auto",
) -> list[Example]:
    """Continue prompts with and without a vector: the winner of a run, or one that is named.

    Without a model, that of the run.
    """
    if model is not None:
        check_folder(model)
    held, winner = _chosen_vectors(run, vectors)
    if model is None and "model" not in winner:
        raise BadInput("no model is given", hint="name it with --model; the --run of a search knows its own")
    model = model or Path(winner["model"])
    check_folder(model)
    layer = layer if layer is not None else winner.get("layer")
    strength = strength if strength is not None else winner.get("strength")
    if layer is None or strength is None:
        raise BadInput("no layer or no strength is given", hint="name --layer and --strength, or --run")
    import torch

    from flatout.engines.steering.blocks import blocks_of, width_of
    from flatout.engines.steering.questions import question_of
    from flatout.engines.steering.trials.scoring import prompts_of
    from flatout.engines.steering.trials.steered_model import steered_model
    from flatout.engines.steering.trials.steering import Steering

    steering = Steering(
        layer=layer,
        direction=held.direction(layer),
        amount=strength
        if mode in ("project-out", "clamp")
        else strength * float(held.norms[held.place_of(layer)]),
        mode=mode,
        where=where or winner.get("where", "last-and-generated"),
    )
    opened = open_model(model, device=device, dtype=dtype)
    steering.check_model(num_layers=len(blocks_of(opened.model)), width=width_of(opened.model))
    questions = [question_of(text, positive="a", negative="b") for text in prompts]
    encoded = prompts_of(questions, opened.tokenizer)
    _check_room(opened, longest=max(map(len, encoded)), max_new_tokens=max_new_tokens)
    examples = []
    for text, tokens in zip(prompts, encoded, strict=True):
        ids = torch.tensor([tokens], device=next(opened.model.parameters()).device)
        unsteered = _continued(opened, ids, max_new_tokens=max_new_tokens)
        with steered_model(opened.model, steering):
            steered = _continued(opened, ids, max_new_tokens=max_new_tokens)
        examples.append(Example(prompt=text, unsteered=unsteered, steered=steered))
    return examples


def _check_room(opened: Opened, *, longest: int, max_new_tokens: int) -> None:
    """transformers only warns of a text that passes the model's positions, and what follows is noise."""
    from flatout.engines.steering.blocks import max_positions

    most = max_positions(opened.model)
    if most is not None and longest + max_new_tokens > most:
        raise BadInput(
            f"a prompt of {longest} tokens and {max_new_tokens} more pass the model's {most}",
            hint="take fewer --max-new-tokens or shorter prompts",
        )


def _continued(opened: Opened, ids: Any, *, max_new_tokens: int) -> str:
    import torch

    model: Any = opened.model
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=opened.tokenizer.pad_token_id or opened.tokenizer.eos_token_id or 0,
        )
    return str(opened.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _chosen_vectors(run: Path | None, vectors: Path | None) -> tuple[SteeringVectors, dict[str, Any]]:
    """A file's vectors, or those of a run's winner and what the winner does with them."""
    from flatout.engines.steering.vectors.steering_vectors import load

    if (run is None) == (vectors is None):
        raise BadInput("name either --run or --vectors", hint="--run takes the winner of a search")
    if vectors is not None:
        return load(vectors), {}
    assert run is not None
    record = load_record(run / RECORD)
    winner = record.winner
    if winner is None:
        raise BadInput(f"the search in {run} has no winner", hint="run it again with more trials")
    settings = make_settings({**read_file(run), "out": str(run)})  # where it lies, not where it was made
    found = load(settings.vectors_folder / f"{winner.method}.safetensors")
    chosen = {"layer": winner.layer, "strength": winner.strength, "where": winner.where}
    return found, {**chosen, "model": settings.model}


def report(run: Path, *, html: Path | None = None, png: Path | None = None) -> StudyRecord:
    """A run as a page and a picture; of one that has not ended, what its study holds so far."""
    path = run if run.is_file() else run / RECORD
    record = load_record(path) if path.is_file() or not (run / FILE).is_file() else _so_far(run)
    if html is not None:
        write_page(page(record), html)
    if png is not None:
        from flatout.engines.steering.report.charts import plot_study

        plot_study(record, png)
    return record


def _so_far(run: Path) -> StudyRecord:
    """The record of a search that has not been concluded."""
    from flatout.engines.steering.report.study_record import SCORE_NAMES, trial_records

    settings = make_settings({**read_file(run), "out": str(run)})
    study = opened_study(settings, worker="reader")
    trials = trial_records(study.study)
    found = study.best()
    return StudyRecord(
        name=settings.study_name,
        model=Path(settings.model).name,
        num_layers=1 + max((trial.layer for trial in trials), default=0),
        score_name=SCORE_NAMES[settings.toward],
        trials=trials,
        best=None if found is None else found[0].number,
        notes=("the search has not been concluded",),
    )


def _opened(settings: SearchSettings) -> Opened:
    """The model on the CPU, on the roomiest GPU, or over several where it does not fit on one."""
    where, indices = placed(settings)
    gpus = [index for name in where.value.replicas[0] if (index := indices[name]) is not None]
    device = "cuda" if where.value.replicas[0] else "cpu"
    return open_model(Path(settings.model), device=device, dtype=settings.dtype, gpus=gpus)
