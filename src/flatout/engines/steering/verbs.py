"""What `flatout steer` does, verb by verb, as plain functions.

`given` is a table of settings by their names (`settings.SearchSettings`).  Errors in it are reported before
anything slow is imported.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engines.run.folder import Outcome, check_empty, choose_folder, draw_if_possible
from flatout.engines.run.models import DTypeOrAuto
from flatout.engines.run.settings import FILE as SETTINGS_FILE
from flatout.engines.run.settings import given_settings
from flatout.engines.steering.load_model import LoadedModel, check_model_folder, load_model
from flatout.engines.steering.questions import read_questions
from flatout.engines.steering.report.record import (
    FILE,
    Continuation,
    StudyRecord,
    load_record,
)
from flatout.engines.steering.settings import (
    SearchSettings,
    make_settings,
    read_settings,
    resume_settings,
)
from flatout.engines.steering.workers.placement import place_model
from flatout.ground import OnCount, OnProgress, ignore
from flatout.ground.errors import BadInput
from flatout.ground.runs import folder_of_run, make_folder

if TYPE_CHECKING:
    from flatout.engines.steering.extract.tiers import HeldTier
    from flatout.engines.steering.search.halved_search import Event
    from flatout.engines.steering.vectors.steering_vectors import SteeringVectors

# What `extract` and `fit`, or a search that ended before its settings, may have put into its folder.
BEFORE = ("activations", "vectors", "rows", "study.journal", "study.journal.lock", ".lock")


@dataclass(frozen=True, kw_only=True, slots=True)
class Extraction:
    """The result of an extraction, and how it was computed."""

    num_texts: int
    layers: tuple[int, ...]
    width: int
    seconds: float
    store: str
    recipe: dict[str, str]
    num_read: int  # of the distinct texts, those that the store had
    break_even: str | None  # when storing beats computing again; None where something came from the store
    tiers: tuple[HeldTier, ...] = ()  # above the store, after the extraction was read once


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenVectors:
    """A file of vectors, and what is in it."""

    path: str
    method: str
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedMethod(WrittenVectors):
    """Vectors of one method."""

    norms: tuple[float, ...]  # the mean length of the residual stream at each layer: what strength 1 adds


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOutcome(Outcome):
    """The record of a search; None for a worker that only joined one."""

    record: StudyRecord | None


def steer_extract(given: Mapping[str, Any], *, on_count: OnCount = ignore) -> Extraction:
    """Put the activations of every question's two answers into the store."""
    settings = make_settings(given)
    check_model_folder(settings.model)
    questions = read_questions(settings.questions)
    from flatout.engines.steering.vectors.fit_questions import extract_questions, open_store

    loaded = _load(settings.model, device=settings.device, dtype=settings.dtype)
    store = open_store(settings)
    began_s = time.perf_counter()
    found = extract_questions(settings, loaded, questions, on_count=on_count, store=store)
    seconds = time.perf_counter() - began_s
    assert found.origin is not None
    keys = [bytes.fromhex(key) for key in dict.fromkeys(found.keys)]
    held = store.read(found.origin, keys=keys, layers=found.layers)
    computed_s = seconds - store.written_s
    pays = store.storing_pays(num_bytes=held.values.nbytes, recompute_s=computed_s, uses=1)
    return Extraction(
        num_texts=len(found.keys),
        layers=found.layers,
        width=found.values.shape[2],
        seconds=seconds,
        store=str(settings.store_folder),
        recipe=dict(found.recipe),
        num_read=found.num_read,
        break_even=None if found.num_read else str(pays.reason),
        tiers=store.tiers.held(),
    )


def steer_fit(
    given: Mapping[str, Any], *, whole: bool = False, on_count: OnCount = ignore
) -> list[FittedMethod]:
    """Fit the vectors of every method on the questions to fit with, or on the whole file."""
    settings = make_settings(given)
    check_model_folder(settings.model)
    from flatout.engines.steering.search.run_search import split_of
    from flatout.engines.steering.vectors.fit_questions import fit_questions, save_vectors
    from flatout.engines.steering.vectors.steering_vectors import method_file

    questions = read_questions(settings.questions) if whole else split_of(settings).train
    loaded = _load(settings.model, device=settings.device, dtype=settings.dtype)
    vectors = fit_questions(settings, loaded, questions, on_count=on_count)
    save_vectors(vectors, settings.vectors_folder)
    return [
        FittedMethod(
            method=name,
            path=str(method_file(settings.vectors_folder, name)),
            layers=made.layers,
            norms=tuple(made.norms.tolist()),
        )
        for name, made in vectors.items()
    ]


def steer(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    join: bool = False,
    worker: str | None = None,
    on_progress: OnProgress = ignore,
    on_event: Callable[[Event], None] = ignore,
) -> SearchOutcome:
    """Search for the vector that steers a model, test the winner, and write the report beside the study.

    `settings` are keys and values, a YAML file or the folder of a run; `changes` override them.
    A folder that holds a search continues it.  `resume` without a folder continues the latest search; `join`
    only adds a worker, named `worker`, to a search that another process started, and returns no record.
    """
    given = given_settings(settings, changes, read=read_settings)
    name = Path(str(given.get("questions") or "search")).stem
    folder = choose_folder(given.get("out"), kind="steer", name=name, resume=resume)
    if resume and not (folder / SETTINGS_FILE).is_file():
        raise BadInput(f"{folder} holds no search to resume", hint="omit --resume to start one")
    if not (join or (folder / SETTINGS_FILE).is_file()):
        check_empty(folder, besides=BEFORE)
    given = {**given, "out": str(folder)}
    chosen = make_settings(given) if join else resume_settings(given)
    check_model_folder(chosen.model)
    from flatout.engines.steering.search.run_search import join_search, run_search

    if join:
        join_search(chosen, worker=worker, on_progress=on_progress, on_event=on_event)
        return SearchOutcome(out=str(folder), record=None)
    record = run_search(chosen, on_progress=on_progress, on_event=on_event)
    _write_page(record, folder / "report.html")
    draw_if_possible(lambda: _draw(record, folder / "report.png"), on_progress=on_progress)
    return SearchOutcome(out=str(folder), record=record)


def steer_apply(
    prompts: Sequence[str],
    *,
    model: Path | str | None = None,
    run: Path | str | None = None,
    vectors: Path | str | None = None,
    layer: int | None = None,
    strength: float | None = None,
    mode: Any = None,
    where: Any = None,
    span: int | None = None,
    max_new_tokens: int = 64,
    device: str = "auto",
    dtype: DTypeOrAuto = "auto",
) -> list[Continuation]:
    """Continue prompts with and without a vector: the winner of a run, or one that is named.

    Without a model, that of the run.
    """
    if model is not None:
        check_model_folder(model)
    held, winner = _choose_vectors(None if run is None else folder_of_run(run), vectors)
    model = model or winner.get("model")
    if model is None:
        raise BadInput("no model is given", hint="name it with --model; the --run of a search knows its own")
    check_model_folder(model)
    layer = layer if layer is not None else winner.get("layer")
    strength = strength if strength is not None else winner.get("strength")
    if layer is None or strength is None:
        raise BadInput("no layer or no strength is given", hint="name --layer and --strength, or --run")
    from flatout.engines.steering.search.space import make_steering
    from flatout.engines.steering.trials.hooked_trials import HookedTrials
    from flatout.engines.steering.trials.scoring import check_room, continue_prompts

    steering = make_steering(
        held,
        layer=layer,
        strength=strength,
        mode=mode or winner.get("mode", "add"),
        where=where or winner.get("where", "last-and-generated"),
        span=span or winner.get("span", 1),
    )
    loaded = _load(model, device=device, dtype=dtype)
    if held.is_of_another_model(loaded.model):
        words = f"the vectors were fitted on other weights than those of {model}"
        warnings.warn(words, RuntimeWarning, stacklevel=2)
    check_room(prompts, loaded.model, loaded.tokenizer, max_new_tokens=max_new_tokens)
    engine = HookedTrials(loaded.model, slots=1)  # in half precision, neighbours change a row's tokens
    return list(continue_prompts(engine, loaded.tokenizer, prompts, steering, max_new_tokens=max_new_tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedVectors(WrittenVectors):
    """Vectors that were read from one file and written to another."""

    width: int


def steer_convert(
    source: Path | str, *, to: Path | str, model: str = "unknown", plain: bool = False
) -> ConvertedVectors:
    """Write vectors in another format: .gguf for repeng and llama.cpp, .safetensors for flatout.

    `model` is the kind of model that a GGUF file names, such as "llama".  With `plain`, a .safetensors file
    is for other libraries: it holds a tensor per layer.
    """
    source, to = Path(source), Path(to)
    if to.suffix not in (".gguf", ".safetensors"):
        raise BadInput(f"{to} is neither .gguf nor .safetensors", hint="end the file name in one of them")
    from flatout.engines.steering.vectors import formats

    vectors = formats.read(source)
    make_folder(to.parent)
    (formats.write_plain if plain else formats.write)(vectors, to, model=model)
    return ConvertedVectors(
        path=str(to), method=vectors.method, layers=vectors.layers, width=vectors.values.shape[1]
    )


def steer_report(run: Path | str, *, html: Path | None = None, png: Path | None = None) -> StudyRecord:
    """Write a run as a page and a picture; of one that has not ended, what its study holds so far."""
    record = _record_of(folder_of_run(run))
    if html is not None:
        _write_page(record, html)
    if png is not None:
        _draw(record, png)
    return record


def _record_of(run: Path) -> StudyRecord:
    """Read what a search found, or how far it is."""
    if run.is_file() or (run / FILE).is_file() or not (run / SETTINGS_FILE).is_file():
        return load_record(run)
    from flatout.engines.steering.search.search_worker import study_of

    settings = make_settings(read_settings(run))
    study = study_of(settings, worker="reader")
    trials, best = study.records(), study.best()
    return StudyRecord(
        name=settings.study_name,
        model=Path(settings.model).name,
        num_layers=1 + max((trial.layer for trial in trials), default=0),
        score_name=settings.score_name,
        trials=trials,
        best=None if best is None else best[0].number,
        notes=("the search has not been concluded",),
    )


def _write_page(record: StudyRecord, path: Path) -> None:
    from flatout.engines.steering.report.page import page
    from flatout.page.document import write_page

    write_page(page(record), path)


def _draw(record: StudyRecord, path: Path) -> Path:
    from flatout.engines.steering.report.charts import plot_study

    return plot_study(record, path)


def _load(model: Path | str, *, device: str, dtype: DTypeOrAuto) -> LoadedModel:
    """Load a model on the CPU, on the GPU with most free memory, or on several if one is too small."""
    placed = place_model(Path(model), device=device, dtype=dtype, workers=1)
    return load_model(model, gpus=placed.value.replicas[0], dtype=dtype)


def _choose_vectors(
    run: Path | str | None, vectors: Path | str | None
) -> tuple[SteeringVectors, dict[str, Any]]:
    """Load a file's vectors, or those of a run's winner and what the winner does with them."""
    from flatout.engines.steering.vectors import formats
    from flatout.engines.steering.vectors.steering_vectors import load, method_file

    if (run is None) == (vectors is None):
        raise BadInput("name either --run or --vectors", hint="--run takes the winner of a search")
    if vectors is not None:
        return formats.read(vectors), {}
    assert run is not None
    winner = load_record(Path(run)).winner
    if winner is None:
        raise BadInput(f"the search in {run} has no winner", hint="run it again with more trials")
    settings: SearchSettings = make_settings(read_settings(Path(run)))
    found = load(method_file(settings.vectors_folder, winner.method))
    names = ("layer", "strength", "where", "mode", "span")
    return found, {**{name: getattr(winner, name) for name in names}, "model": settings.model}
