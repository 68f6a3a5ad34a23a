"""A search from a folder of settings to a report: the first worker, the others, and the end.

The process that is asked for a search is its first worker.  It opens the model once, fits the vectors if
there are none, starts a worker for each further replica, searches beside them, takes over what a dead one
left open, and tests the winner.  Any other process joins by opening the same study under a name of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.atomic_files import refused_by_disk, try_lock, unwritable
from flatout.decisions import Decision
from flatout.engines.steering.loading import Opened, check_folder, open_model
from flatout.engines.steering.questions import Question, read_questions, split_questions
from flatout.engines.steering.report.record import StudyRecord, load_record, save_record
from flatout.engines.steering.search.neutral_texts import read_neutral
from flatout.engines.steering.settings import SearchSettings, chosen_layers, save_settings
from flatout.engines.steering.vectors.fit_questions import save_vectors
from flatout.engines.steering.workers.crew import Crew, end_with_starter, plan_workers
from flatout.engines.steering.workers.heartbeat import Beating, wait_for_silence
from flatout.engines.steering.workers.placement import Placement, gpus_of, place, weights_bytes
from flatout.errors import BadInput, Interrupted, import_extra, is_interrupt

if TYPE_CHECKING:
    from flatout.engines.steering.search.halved_search import Event, Search
    from flatout.engines.steering.search.study import SearchStudy
    from flatout.engines.steering.trials.packed_trials import PackedTrials
    from flatout.engines.steering.vectors.steering_vectors import SteeringVectors

FIRST = "0"  # the name of the worker that starts the others
RECORD = "result.json"
MOST_BATCH_TRIALS = 32
GPU_ROWS, CPU_ROWS = 256, 64
INTERRUPTS = (KeyboardInterrupt, RuntimeError, OSError)  # a lock of Optuna's turns one into another

Say = Callable[[str], None]
OnEvent = Callable[["Event"], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Questions to fit, to search and to test with; no question is in two of them."""

    train: list[Question]
    search: list[Question]
    fresh: list[Question]


def split_of(settings: SearchSettings) -> Split:
    low, middle, high = settings.shares
    parts = split_questions(
        read_questions(settings.questions), seed=settings.seed, shares=(low, middle, high)
    )
    return Split(train=parts[0], search=parts[1], fresh=parts[2])


def placed(settings: SearchSettings) -> tuple[Decision[Placement], dict[str, int | None]]:
    """Where the replicas go, and CUDA's numbers of the GPUs by name."""
    from flatout.hardware.nvml import read_gpus

    rooms = [] if settings.device == "cpu" else gpus_of(read_gpus())
    needed = weights_bytes(Path(settings.model), dtype=settings.dtype, on_gpu=bool(rooms))
    decision = place(weights_bytes=needed, gpus=rooms, workers=settings.workers, device=settings.device)
    return decision, {room.name: room.index for room in rooms}


def run_search(settings: SearchSettings, *, say: Say, on_event: OnEvent) -> StudyRecord:
    """Search as the first worker of a study, and conclude it."""
    check_folder(Path(settings.model))
    from flatout.engines.steering.blocks import blocks_of
    from flatout.engines.steering.blocks import chosen_layers as named_layers
    from flatout.engines.steering.trials.scoring import check_choices

    split = split_of(settings)
    read_neutral(settings.neutral)  # it is needed at the end, which is no time to find it missing
    where, indices = placed(settings)
    say(f"replicas: {where}")
    with _only_one(settings.folder):
        opened = _opened(settings, where.value.replicas[0], indices)
        named_layers(chosen_layers(settings.layers), num_layers=len(blocks_of(opened.model)))
        check_choices([*split.search, *split.fresh], opened.model, opened.tokenizer)
        vectors = fitted(settings, split, opened, on_event=on_event)
        engine = engine_of(settings, split, opened, say=say)
        study = opened_study(settings, worker=FIRST)
        work = prepared(settings, split, opened, vectors, engine=engine, study=study, on_event=on_event)
        # What is written here binds the next call: nothing is before all of it has proved right.
        path = save_settings(settings)
        keep_vectors(settings, vectors, say=say)
        earlier_s = _earlier_s(settings, study)
        began_s = time.monotonic()
        try:
            with Beating(study.study, FIRST), _crew(settings, where.value, path, say=say) as crew:
                work.run(trials=settings.trials, batch_trials=_batch_trials(settings, where.value))
                dead = {one.name for one in crew.wait()}
                for theirs in _left_open(settings, study, known_dead=dead, say=say):
                    prepared(
                        settings, split, opened, vectors, engine=engine, study=theirs, on_event=on_event
                    ).run(trials=settings.trials)
        except INTERRUPTS as error:
            _end_for_the_user(error, settings)
            raise
        search_s = time.monotonic() - began_s
        from flatout.engines.steering.search.test_winner import conclude

        record = conclude(settings, split, opened, vectors, study=study, work=work, engine=engine, say=say)
        record = dataclasses.replace(
            record,
            search_s=None if earlier_s is None else earlier_s + search_s,
            notes=(f"replicas: {where}", *record.notes),
        )
        save_record(record, settings.folder / RECORD)
    return record


def _earlier_s(settings: SearchSettings, study: SearchStudy) -> float | None:
    """How long earlier calls searched; None where one was killed before it could say."""
    asked = study.num_asked()
    if not asked:
        return 0.0
    path = settings.folder / RECORD
    earlier = load_record(path) if path.is_file() else None
    return earlier.search_s if earlier is not None and len(earlier.trials) == asked else None


def join_search(settings: SearchSettings, *, worker: str | None, say: Say, on_event: OnEvent) -> None:
    """Draw trials from a study that another process has begun, until it has enough."""
    check_folder(Path(settings.model))
    end_with_starter()
    split = split_of(settings)
    where, indices = placed(dataclasses.replace(settings, workers=1))
    vectors = read_vectors(settings.vectors_folder, methods=settings.methods)
    name = worker or re.sub(r"[^\w.-]", "-", f"{socket.gethostname()}-{os.getpid()}")
    study = opened_study(settings, worker=name)
    opened = _opened(settings, where.value.replicas[0], indices)
    with Beating(study.study, name):
        engine = engine_of(settings, split, opened, say=say)
        work = prepared(settings, split, opened, vectors, engine=engine, study=study, on_event=on_event)
        say(f"{name} has joined the study {settings.study_name!r}")
        try:
            work.run(trials=settings.trials, batch_trials=_batch_trials(settings, where.value))
        except INTERRUPTS as error:
            _end_for_the_user(error, settings)
            raise


def _end_for_the_user(error: BaseException, settings: SearchSettings) -> None:
    """An interrupt or a disk that takes no more, as what they are; nothing for any other error."""
    if is_interrupt(error):
        hint = f"every finished row is kept in {settings.out}; run it again to go on"
        raise Interrupted("interrupted", hint=hint) from None
    if refused := refused_by_disk(error):
        when_full = "free some space and run it again to go on; every finished row is kept"
        raise unwritable(hidden_password(_storage_of(settings)), refused, when_full=when_full) from None


def _storage_of(settings: SearchSettings) -> str:
    return settings.storage or str(settings.folder / "study.journal")


def opened_study(settings: SearchSettings, *, worker: str) -> SearchStudy:
    """The study as a worker sees it; BadInput where its storage cannot be reached."""
    import_extra("optuna", extra="steering")
    from flatout.engines.steering.search.study import open_study

    target = _storage_of(settings)
    try:
        return open_study(
            target,
            name=settings.study_name,
            seed=settings.seed,
            worker=worker,
            alone=False,
            rows=settings.folder / "rows",
        )
    except _storage_errors() as error:
        if refused := refused_by_disk(error):
            raise unwritable(hidden_password(target), refused) from None
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadInput(
            f"the storage {hidden_password(target)} cannot be reached: {reason}",
            hint="check the address and that it runs, or leave --storage away for a journal file",
        ) from None


def hidden_password(url: str) -> str:
    """A storage's address as it may be shown."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:...@", url)


def _storage_errors() -> tuple[type[Exception], ...]:
    """What storages raise when they are not there; their packages are there only if they are used."""
    optuna: Any = import_extra("optuna", extra="steering")
    found: list[type[Exception]] = [OSError, optuna.exceptions.StorageInternalError]
    for module, name in (("sqlalchemy.exc", "SQLAlchemyError"), ("grpc", "RpcError")):
        if module.split(".")[0] in sys.modules:
            found.append(getattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name))
    return tuple(found)


def _opened(settings: SearchSettings, gpus: Sequence[str], indices: dict[str, int | None]) -> Opened:
    known = [index for name in gpus if (index := indices[name]) is not None]
    return open_model(
        Path(settings.model), device="cuda" if gpus else "cpu", dtype=settings.dtype, gpus=known
    )


def fitted(
    settings: SearchSettings, split: Split, opened: Opened, *, on_event: OnEvent
) -> dict[str, SteeringVectors]:
    """The vectors of every method, from their folder or from the questions to fit with."""
    if _has_vectors(settings):
        return read_vectors(settings.vectors_folder, methods=settings.methods)
    from flatout.engines.steering.search.halved_search import Event
    from flatout.engines.steering.vectors.fit_questions import fit_methods

    return fit_methods(
        opened,
        split.train,
        methods=settings.methods,
        layers=chosen_layers(settings.layers),
        position=settings.position,
        store=settings.store_folder,
        seed=settings.seed,
        on_progress=lambda done, total: on_event(Event(kind="extracted", num_done=done, num_total=total)),
    )


def keep_vectors(settings: SearchSettings, vectors: dict[str, SteeringVectors], *, say: Say) -> None:
    """Write vectors that were fitted here where the other workers, and the next call, read them."""
    if not _has_vectors(settings):
        save_vectors(vectors, settings.vectors_folder)
        say(f"vectors of {len(vectors)} methods are in {settings.vectors_folder}")


def _has_vectors(settings: SearchSettings) -> bool:
    files = (settings.vectors_folder / f"{name}.safetensors" for name in settings.methods)
    return settings.vectors is not None or all(file.is_file() for file in files)


def read_vectors(folder: Path, *, methods: Sequence[str]) -> dict[str, SteeringVectors]:
    """Vectors that `flatout steer fit` wrote, by method."""
    from flatout.engines.steering.vectors.steering_vectors import load

    found = {name: folder / f"{name}.safetensors" for name in methods}
    absent = [name for name, path in found.items() if not path.is_file()]
    if absent:
        there = sorted(path.stem for path in folder.glob("*.safetensors"))
        raise BadInput(
            f"{folder} has no vectors of {', '.join(absent)}",
            hint=f"it has {', '.join(there)}" if there else "make them with flatout steer fit",
        )
    return {name: load(path) for name, path in found.items()}


def engine_of(
    settings: SearchSettings, split: Split, opened: Opened, *, say: Say = lambda message: None
) -> PackedTrials:
    """What runs the rows of all trials, as many at a time as the device takes."""
    from flatout.engines.steering.search.halved_search import TOKENS_PER_ROW
    from flatout.engines.steering.trials.hooked_trials import HookedTrials
    from flatout.engines.steering.trials.packed_trials import PackedTrials
    from flatout.engines.steering.trials.scoring import prompts_of

    on_gpu = next(opened.model.parameters()).device.type == "cuda"
    rows = settings.rows or (GPU_ROWS if on_gpu else CPU_ROWS)
    longest = max(map(len, prompts_of(split.fresh, opened.tokenizer)))
    devices = {parameter.device for parameter in opened.model.parameters()}
    reason = f"it lies on {len(devices)} devices"
    if len(devices) == 1:
        try:
            return PackedTrials(
                opened.model,
                slots=rows,
                batch_tokens=rows * TOKENS_PER_ROW,
                max_tokens=longest + settings.max_new_tokens,
            )
        except BadInput as error:  # a family that the packed engine does not read
            reason = error.message
    say(f"rows run through the model's own forward, and prompts are not shared: {reason}")
    return HookedTrials(opened.model, slots=rows, batch_tokens=rows * TOKENS_PER_ROW)


def prepared(
    settings: SearchSettings,
    split: Split,
    opened: Opened,
    vectors: dict[str, SteeringVectors],
    *,
    engine: PackedTrials,
    study: SearchStudy,
    on_event: OnEvent,
) -> Search:
    """The search over one model, bound to the study: a study of another model is refused."""
    from flatout.engines.run.fingerprint import model_fingerprint, tokenizer_fingerprint
    from flatout.engines.steering.search.halved_search import Search
    from flatout.engines.steering.search.halving import Halving
    from flatout.engines.steering.search.space import Space
    from flatout.engines.steering.trials.scoring import MultipleChoice

    low, high = settings.strength
    wanted = chosen_layers(settings.layers)
    space = Space.of(
        vectors,
        layers=None if wanted == "all" else wanted,
        strength=(low, high),
        where=settings.where,
    )
    work = Search(
        engine,
        vectors,
        split.search,
        study=study,
        scorer=MultipleChoice(opened.tokenizer, toward=settings.toward),
        space=space,
        halving=Halving(rungs=settings.rungs),
        on_event=on_event,
    )
    names = {"model": model_fingerprint(opened.model), "tokenizer": tokenizer_fingerprint(opened.tokenizer)}
    study.bind({**names, **work.recipe()})
    return work


def _batch_trials(settings: SearchSettings, placement: Placement) -> int:
    """Trials that are halved together: many fill the batch, but the sampler learns between brackets."""
    share = math.ceil(settings.trials / (2 * len(placement.replicas)))
    return max(1, min(MOST_BATCH_TRIALS, share))


def joining_command(settings: Path) -> list[str]:
    """What adds a worker to a search, here or on another machine."""
    return [sys.executable, "-m", "flatout", "steer", "search", str(settings), "--join"]


def _crew(settings: SearchSettings, placement: Placement, path: Path, *, say: Say) -> Any:
    """The workers beside this one."""
    command = joining_command(path)
    if settings.ray is None:
        return Crew(command, plan_workers(placement, cores=os.cpu_count() or 1), say=say)
    from flatout.engines.steering.workers.ray_crew import RayCrew, RayPlan

    plan = RayPlan(workers=settings.workers or 1, gpus_each=len(placement.replicas[0]), address=settings.ray)
    return RayCrew(command, plan, say=say)


def _left_open(
    settings: SearchSettings, study: SearchStudy, *, known_dead: Collection[str], say: Say
) -> Iterator[SearchStudy]:
    """The study as each worker that has died saw it, so that its open trials end over its finished rows."""
    from flatout.engines.steering.search.study import WORKER

    while True:
        open_ones = unfinished_workers(study)
        name = wait_for_silence(study.study, open_ones, known_dead=known_dead, say=say)
        if name is None:
            break
        say(f"taking over what {name} left open")
        yield opened_study(settings, worker=name)
    for one in study.study.get_trials(deepcopy=False):
        if not one.state.is_finished() and WORKER not in one.user_attrs:
            study.fail(one.number, "its worker died before it had a configuration")


def unfinished_workers(study: SearchStudy) -> set[str]:
    """Names of the other workers with trials that have not ended."""
    from flatout.engines.steering.search.study import WORKER

    found = {
        one.user_attrs.get(WORKER)
        for one in study.study.get_trials(deepcopy=False)
        if not one.state.is_finished()
    }
    return {name for name in found if name is not None and name != FIRST}


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """One starter for each folder: two would run the same trials under one name."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        if try_lock(file) is False:
            raise BadInput(
                f"another search runs in {folder}", hint="wait for it, or add a worker to it with --join"
            )
        yield
