"""A search from its settings to a record: the first worker, the others, and the end.

The process that is asked for a search is its first worker.  It loads the model once, fits the vectors if
there are none, starts a worker for each further replica, searches beside them, takes over what a dead one
left open, and tests the winner.  Any other process joins by opening the same study under a name of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from flatout.engines.run.folder import record_run
from flatout.engines.run.settings import save_settings
from flatout.engines.steering.load_model import LoadedModel, load_model
from flatout.engines.steering.model_blocks import blocks_of, chosen_layers
from flatout.engines.steering.questions import QuestionSplit, read_neutral, read_questions, split_questions
from flatout.engines.steering.report.record import FILE, StudyRecord, load_record, save_record
from flatout.engines.steering.search.halved_search import Event, OnEvent
from flatout.engines.steering.search.search_worker import (
    FEWEST_BATCH_TRIALS,
    SearchWorker,
    storage_of,
    study_of,
)
from flatout.engines.steering.search.storage import hide_password
from flatout.engines.steering.search.study import SearchStudy, check_cmaes
from flatout.engines.steering.search.test_winner import conclude_search
from flatout.engines.steering.settings import SearchSettings, read_layers
from flatout.engines.steering.trials.scoring import check_choices, check_room, find_judge
from flatout.engines.steering.vectors.fit_questions import fit_questions, save_vectors
from flatout.engines.steering.vectors.steering_vectors import load_methods, method_file
from flatout.engines.steering.workers.heartbeat import Heartbeat, read_beats, wait_for_silence
from flatout.engines.steering.workers.placement import Placement, place_model
from flatout.engines.steering.workers.ray_workers import RayWorkers
from flatout.engines.steering.workers.worker_processes import WorkerProcesses, end_with_starter, plan_workers
from flatout.ground import OnProgress
from flatout.ground.atomic_files import refused_by_disk, try_lock, unwritable
from flatout.ground.errors import BadInput, Interrupted, is_interrupt
from flatout.hardware.ray_cluster import RayCluster

FIRST = "0"  # the name of the worker that starts the others


def split_of(settings: SearchSettings) -> QuestionSplit:
    """Read the questions of a search and split them."""
    return split_questions(read_questions(settings.questions), seed=settings.seed, shares=settings.shares)


def run_search(settings: SearchSettings, *, on_progress: OnProgress, on_event: OnEvent) -> StudyRecord:
    """Search as the first worker of a study, and conclude it."""
    split = split_of(settings)
    read_neutral(settings.neutral)  # it is needed at the end: find out now if it is missing
    if settings.judge is not None:
        find_judge(settings.judge)
    if settings.sampler == "cmaes":
        check_cmaes()
    placed = place_model(
        Path(settings.model), device=settings.device, dtype=settings.dtype, workers=settings.workers
    )
    on_progress(f"replicas: {placed}")
    if settings.ray is not None and settings.device == "auto" and not placed.value.replicas[0]:
        _refuse_idle_gpus(settings.ray)
    with _only_one(settings.folder), record_run(settings.folder, kind="steer", name=settings.study_name):
        loaded = load_model(settings.model, gpus=placed.value.replicas[0], dtype=settings.dtype)
        chosen_layers(read_layers(settings.layers), num_layers=len(blocks_of(loaded.model)))
        _check_questions(settings, split, loaded)
        if has_vectors := _has_vectors(settings):
            vectors = load_methods(settings.vectors_folder, methods=settings.methods)
        else:
            count = lambda done, total: on_event(Event(kind="extracted", num_done=done, num_total=total))  # noqa: E731
            vectors = fit_questions(settings, loaded, split.train, on_count=count)
        worker = SearchWorker(settings, split, loaded, vectors, on_progress=on_progress, on_event=on_event)
        study = study_of(settings, worker=FIRST)
        search = worker.search_in(study)
        # What is written here binds the next call, so everything is checked before it.
        path = save_settings(settings.folder, settings)
        if not has_vectors:
            save_vectors(vectors, settings.vectors_folder)
            on_progress(f"vectors of {len(vectors)} methods are in {settings.vectors_folder}")
        earlier_s = _earlier_s(settings, study)
        began_s = time.monotonic()
        workers = _workers(settings, placed.value, path, study, on_progress=on_progress)
        with _end_for_the_user(settings), Heartbeat(study.study, FIRST), workers:
            together = worker.batch_trials(num_workers=len(placed.value.replicas))
            search.run(trials=settings.trials, batch_trials=together)
            dead = {one.name for one in workers.wait()}
            for theirs in _left_open(settings, study, known_dead=dead, on_progress=on_progress):
                worker.search_in(theirs).run(trials=settings.trials)
        search_s = time.monotonic() - began_s
        search.refuse_all_failed()
        record = conclude_search(worker, search, on_progress=on_progress)
        record = dataclasses.replace(
            record,
            search_s=None if earlier_s is None else earlier_s + search_s,
            notes=(f"replicas: {placed}", *record.notes),
        )
        save_record(record, settings.folder / FILE)
    return record


def _refuse_idle_gpus(address: str) -> None:
    """Refuse a cluster of GPUs where this process has none: its workers take as many as it has."""
    with RayCluster(address) as cluster:
        cluster.take(1)
        if cluster.gpus:
            raise BadInput(
                "this process has no GPU, but the nodes of the Ray cluster do",
                hint="ray job submit --entrypoint-num-gpus 1 gives it one; --device cpu leaves them idle",
            )


def _check_questions(settings: SearchSettings, split: QuestionSplit, loaded: LoadedModel) -> None:
    """Refuse a question that the model has no room for before anything is asked."""
    asked = [*split.search, *split.fresh]
    if settings.judge is None:
        check_choices(asked, loaded.model, loaded.tokenizer)
        return
    prompts = [question.prompt for question in asked]
    check_room(prompts, loaded.model, loaded.tokenizer, max_new_tokens=settings.max_new_tokens)


def join_search(
    settings: SearchSettings, *, worker: str | None, on_progress: OnProgress, on_event: OnEvent
) -> None:
    """Draw trials from a study that another process started, until it has enough."""
    end_with_starter()
    split = split_of(settings)
    placed = place_model(Path(settings.model), device=settings.device, dtype=settings.dtype, workers=1)
    vectors = load_methods(settings.vectors_folder, methods=settings.methods)
    name = worker or re.sub(r"[^\w.-]", "-", f"{socket.gethostname()}-{os.getpid()}")
    study = study_of(settings, worker=name)
    loaded = load_model(settings.model, gpus=placed.value.replicas[0], dtype=settings.dtype)
    with _end_for_the_user(settings), Heartbeat(study.study, name):
        made = SearchWorker(settings, split, loaded, vectors, on_progress=on_progress, on_event=on_event)
        search = made.search_in(study)
        on_progress(f"{name} has joined the study {settings.study_name!r}")
        few = min(FEWEST_BATCH_TRIALS, made.batch_trials(num_workers=1))  # the others want trials too
        search.run(trials=settings.trials, batch_trials=few)


def _has_vectors(settings: SearchSettings) -> bool:
    files = (method_file(settings.vectors_folder, name) for name in settings.methods)
    return settings.vectors is not None or all(file.is_file() for file in files)


def _earlier_s(settings: SearchSettings, study: SearchStudy) -> float | None:
    """Return how long earlier calls searched; None if one was killed before it could record that."""
    asked = study.num_asked()
    if not asked:
        return 0.0
    path = settings.folder / FILE
    earlier = load_record(path) if path.is_file() else None
    return earlier.search_s if earlier is not None and len(earlier.trials) == asked else None


def joining_command(settings: Path) -> list[str]:
    """Return the command that adds a worker to a search, here or on another machine."""
    return [sys.executable, "-m", "flatout", "steer", "search", str(settings), "--join"]


def _workers(
    settings: SearchSettings, placement: Placement, path: Path, study: SearchStudy, *, on_progress: OnProgress
) -> WorkerProcesses | RayWorkers:
    """Plan the other workers."""
    command = joining_command(path)
    if settings.ray is None:
        return WorkerProcesses(
            command, plan_workers(placement, cores=os.cpu_count() or 1), on_progress=on_progress
        )
    return RayWorkers(
        command,
        workers=settings.workers or 1,
        gpus_each=len(placement.replicas[0]),
        address=settings.ray,
        beats=lambda: read_beats(study.study),
        on_progress=on_progress,
    )


def _left_open(
    settings: SearchSettings, study: SearchStudy, *, known_dead: Collection[str], on_progress: OnProgress
) -> Iterator[SearchStudy]:
    """Yield the study as each dead worker saw it, so that its open trials end over its finished rows."""
    while True:
        name = wait_for_silence(
            study.study, study.open_workers(), known_dead=known_dead, on_progress=on_progress
        )
        if name is None:
            break
        on_progress(f"taking over what {name} left open")
        yield study_of(settings, worker=name)
    study.fail_ownerless()


@contextlib.contextmanager
def _end_for_the_user(settings: SearchSettings) -> Iterator[None]:
    """Say in one line that a search was interrupted, or that the disk takes no more."""
    try:
        yield
    except (KeyboardInterrupt, RuntimeError, OSError) as error:  # a lock of Optuna's turns one into another
        if is_interrupt(error):
            hint = f"every finished row is kept in {settings.out}; run it again to continue"
            raise Interrupted("interrupted", hint=hint) from None
        if refused := refused_by_disk(error):
            when_full = "free some space and run it again to continue; every finished row is kept"
            raise unwritable(hide_password(storage_of(settings)), refused, when_full=when_full) from None
        raise


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Let one process at a time start a search in a folder: two would run the same trials under one name."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        if try_lock(file) is False:
            raise BadInput(
                f"another search runs in {folder}", hint="wait for it, or add a worker to it with --join"
            )
        yield
