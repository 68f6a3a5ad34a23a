"""Train by evolution, train adapters, and search steering vectors.

`settings` are keys and values, a YAML file, or the folder of a run; `changes` win over them, and a key of
them may reach into a table ("phase1.steps").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.engines.adapters.evaluation.predict import Answer
    from flatout.engines.adapters.evaluation.results import Evaluation
    from flatout.engines.adapters.run_folder import AdaptStatus
    from flatout.engines.adapters.verbs import AdaptOutcome
    from flatout.engines.evolution.training.records import EpochRecord
    from flatout.engines.evolution.training.trainer import EvolveOutcome as Evolution
    from flatout.engines.evolution.verify import Verification
    from flatout.engines.steering.report.record import Continuation, StudyRecord
    from flatout.engines.steering.search.halved_search import Event
    from flatout.engines.steering.verbs import ConvertedVectors, Extraction, FittedMethod, SearchOutcome

OnText = Callable[[str], None]
OnCount = Callable[[int, int], None]


def evolve(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    on_event: Callable[[EpochRecord], None] = lambda record: None,
    on_progress: OnText = lambda message: None,
) -> Evolution:
    """Evolve a language model on a task, as `flatout evolve` does; a mapping may hold a task object."""
    from flatout.engines.evolution.settings import read_settings
    from flatout.engines.evolution.training.trainer import evolve

    given = _given(settings, changes, read=read_settings)
    return evolve(given, resume=resume, on_event=on_event, on_progress=on_progress)


def verify_evolution(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    on_progress: OnText = lambda message: None,
) -> Verification:
    """Hold every optimisation of `evolve` beside its plain form, on the model and task of the settings."""
    from flatout.engines.evolution.settings import read_settings
    from flatout.engines.evolution.verify import verify

    return verify(_given(settings, changes, read=read_settings), on_progress=on_progress)


def adapt(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    phases: tuple[str, ...] = ("phase1", "phase2", "phase3"),
    resume: bool = False,
    heads_only: bool = False,
    on_line: OnText = lambda line: None,
    on_progress: OnText = lambda message: None,
) -> AdaptOutcome:
    """Train adapters for several tasks and the router among them, as `flatout adapt train` does."""
    from flatout.engines.adapters.settings import read_settings
    from flatout.engines.adapters.verbs import train

    return train(
        _given(settings, changes, read=read_settings),
        phases=phases,
        resume=resume,
        heads_only=heads_only,
        on_line=on_line,
        on_progress=on_progress,
    )


def adapt_status(run: str | Path) -> AdaptStatus:
    """Read how far each phase of a run of adapters is."""
    from flatout.engines.adapters.verbs import status

    return status(_folder_of(run))


def adapt_evaluate(
    run: str | Path, *, on_progress: OnText = lambda message: None, **options: Any
) -> tuple[Evaluation, Path]:
    """Score a run on rows held out; return the scores and the page that shows them."""
    from flatout.engines.adapters.verbs import evaluate

    return evaluate(_folder_of(run), on_progress=on_progress, **options)


def adapt_predict(run: str | Path, texts: Sequence[str], **options: Any) -> list[Answer]:
    """Answer texts with what a run learned."""
    from flatout.engines.adapters.verbs import predict

    return predict(_folder_of(run), texts, **options)


def adapt_export(
    run: str | Path, *, to: Path, tasks: Sequence[str] | None = None, model: str | None = None
) -> list[Path]:
    """Write the adapters, heads and router of a run as files that need no Flatout."""
    from flatout.engines.adapters.verbs import export

    return export(_folder_of(run), to=to, tasks=tasks, model=model)


def steer(
    settings: Mapping[str, Any] | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    join: bool = False,
    worker: str | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_progress: OnText = lambda message: None,
) -> SearchOutcome:
    """Search the vector that steers a model and test it, as `flatout steer search` does.

    A worker that only joins a search has no record.
    """
    from flatout.engines.steering.settings import read_settings
    from flatout.engines.steering.verbs import search

    given = _given(settings, changes, read=read_settings)
    return search(given, resume=resume, join=join, worker=worker, on_progress=on_progress, on_event=on_event)


def steer_extract(settings: Mapping[str, Any], *, on_count: OnCount = lambda done, total: None) -> Extraction:
    """Store the activations of every question's two answers."""
    from flatout.engines.steering.verbs import extract

    return extract(settings, on_count=on_count)


def steer_fit(
    settings: Mapping[str, Any], *, whole: bool = False, on_count: OnCount = lambda done, total: None
) -> list[FittedMethod]:
    """Fit steering vectors and write them to the folder `vectors`."""
    from flatout.engines.steering.verbs import fit

    return fit(settings, whole=whole, on_count=on_count)


def steer_apply(
    prompts: Sequence[str],
    *,
    run: str | Path | None = None,
    model: str | Path | None = None,
    **options: Any,
) -> list[Continuation]:
    """Continue prompts with and without a steering vector."""
    from flatout.engines.steering.verbs import apply

    folder = None if run is None else _folder_of(run)
    return apply(prompts, run=folder, model=None if model is None else Path(model), **options)


def steer_convert(source: str | Path, *, to: str | Path, model: str = "unknown") -> ConvertedVectors:
    """Read steering vectors of another library, or write them for one."""
    from flatout.engines.steering.verbs import convert

    return convert(source, to=to, model=model)


def steer_report(run: str | Path, *, html: Path | None = None, png: Path | None = None) -> StudyRecord:
    """Read what a search found, as far as it is; also write it as a page and as a picture."""
    from flatout.engines.steering.verbs import report

    return report(_folder_of(run), html=html, png=png)


def _given(
    settings: Mapping[str, Any] | Path,
    changes: Mapping[str, Any] | None,
    *,
    read: Callable[[Path], dict[str, Any]],
) -> dict[str, Any]:
    """Collect what the user said, and nothing that they did not say."""
    from flatout.engines.run.settings import with_setting

    given = dict(settings) if isinstance(settings, Mapping) else read(settings)
    for key, value in (changes or {}).items():
        given = with_setting(given, key, value)
    return given


def _folder_of(run: str | Path) -> Path:
    """Find the folder of a run that is named by its path, its name, or a part of it."""
    from flatout.ground.runs import find_run

    return Path(run) if Path(run).exists() else find_run(str(run))
