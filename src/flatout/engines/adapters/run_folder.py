"""The folder of a run: how far it is, and whether a phase may begin there."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatout.engines.adapters.settings import AdaptConfig, check_unchanged, make_config, read_file
from flatout.engines.adapters.training import checkpoint
from flatout.engines.adapters.training.checkpoint import PHASES, Checkpoint, Progress
from flatout.engines.adapters.training.log import KIND, StepRecord
from flatout.engines.run import log
from flatout.errors import BadInput

HEADS_ONLY = "heads-only"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseStatus:
    """How far a phase is; `step` None: no checkpoint was kept yet, `logged_step` None: no report was made.

    A phase that is begun is going on while its run lives, and else interrupted; it is only `begun` where the
    file system cannot tell.
    """

    name: str
    state: Literal["not begun", "begun", "going on", "interrupted", "finished"] = "not begun"
    step: int | None = None
    steps: int | None = None
    finished: bool = False
    logged_step: int | None = None
    elapsed_s: float | None = None
    progress: dict[str, Progress] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """How far a run is; `resume` is the command that goes on with an interrupted one."""

    out: str
    phases: tuple[PhaseStatus, ...]
    resume: str | None = None


def status(out: Path) -> Status:
    """How far the run in a folder is."""
    lives = log.is_written(out)
    found = {phase: checkpoint.latest(out / phase) for phase in PHASES}
    # In the order of the lines: a resumed run does steps again, and its last line says where it is.
    logged = log.read_records(out, KIND) if _is_log_of_adapters(out) else ()
    reports = {record.phase: record for record in logged}
    if not any(found.values()) and not reports and not lives:
        raise BadInput(f"{out} holds no run of adapters", hint="name the folder that train was given as out")
    phases = tuple(_status(phase, found[phase], reports.get(phase), lives=lives) for phase in PHASES)
    stopped = any(each.state in ("interrupted", "begun") for each in phases)
    command = f"flatout adapt train {shlex.quote(str(out))} --resume"
    return Status(out=str(out), phases=phases, resume=command if stopped else None)


def _status(
    phase: str, found: Checkpoint | None, report: StepRecord | None, *, lives: bool | None
) -> PhaseStatus:
    if found is None and report is None:
        return PhaseStatus(name=phase)
    kept = None if found is None else found.state
    finished = kept is not None and kept.finished
    under_way: Any = {True: "going on", False: "interrupted", None: "begun"}[lives]
    elapsed = [each.elapsed_s for each in (kept, report) if each is not None and each.elapsed_s is not None]
    return PhaseStatus(
        name=phase,
        state="finished" if finished else under_way,
        step=None if kept is None else kept.step,
        steps=None if kept is None else kept.steps,
        finished=finished,
        logged_step=None if report is None else report.step,
        elapsed_s=max(elapsed, default=None),
        progress={} if kept is None else kept.progress,
    )


def read_given(path: Path) -> dict[str, Any]:
    """The keys of a config file, or those that the run in a folder was given."""
    if not path.is_dir():
        return read_file(path)
    kept = [found for phase in PHASES if (found := checkpoint.latest(path / phase)) is not None]
    if kept:
        return {**kept[-1].state.config, "out": str(path)}
    if not _is_log_of_adapters(path):
        raise BadInput(f"{path} holds no run of adapters", hint="name a config file, or the folder of a run")
    return {**(log.logged_settings(path, KIND) or {}), "out": str(path)}


def furthest(out: Path) -> Checkpoint:
    """The last checkpoint of the last phase that has one: its best weights are what the run can do."""
    for phase in reversed(PHASES):
        if (found := checkpoint.latest(out / phase)) is not None:
            return found
    raise BadInput(f"{out} holds no run of adapters", hint="name the folder that train was given as out")


def before(out: Path, phase: str) -> Checkpoint:
    """The finished phase that `phase` begins with."""
    found = checkpoint.latest(out / PHASES[PHASES.index(phase) - 1])
    assert found is not None, "to_do has looked"
    return found


def config_of(
    out: Path,
    *,
    model: str | None = None,
    device: str | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
) -> AdaptConfig:
    """The settings of the run in a folder; where it lies, what it runs on and how it routes may change."""
    kept = furthest(out).state.config
    changed: dict[str, Any] = {"out": str(out)}
    changed |= {} if model is None else {"model": model}
    changed |= {"device": device or "auto"}
    asked = {"top_k": top_k, "threshold": threshold}
    routing = {name: value for name, value in asked.items() if value is not None}
    return make_config({**kept, **changed, "router": {**kept.get("router", {}), **routing}})


def without_adapters(config: AdaptConfig) -> AdaptConfig:
    """The same run with heads alone, in a folder of its own."""
    return dataclasses.replace(config, heads_only=True, out=str(Path(config.out) / HEADS_ONLY))


def to_do(
    config: AdaptConfig, phases: tuple[str, ...], *, resume: bool
) -> tuple[dict[str, Checkpoint | None], list[str]]:
    """The phases to run with what each goes on from, and what is to be said of those that are not run."""
    out = Path(config.out)
    found = {phase: checkpoint.latest(out / phase) for phase in PHASES}
    if not resume:
        _check_fresh(out, {phase: found[phase] for phase in phases})
    before = PHASES[: PHASES.index(phases[0])]
    for phase in before:
        done = found[phase]
        if done is None or not done.state.finished:
            raise BadInput(
                f"{phases[0]} needs {phase}, which is not finished in {out}",
                hint=f"--phase {phase.removeprefix('phase')} first, or --phase all",
            )
        check_unchanged(done.state.config, config, phase=None)
    running: dict[str, Checkpoint | None] = {}
    notes = []
    for phase in phases:
        done = found[phase]
        if done is not None and done.state.finished:
            check_unchanged(done.state.config, config, phase=phase)
            notes.append(f"{phase} is finished at step {done.state.step}: it is not trained again")
        else:
            running[phase] = done
    return running, notes


def _check_fresh(out: Path, found: dict[str, Checkpoint | None]) -> None:
    for phase, each in found.items():
        if each is not None:
            how_far = "finished" if each.state.finished else "begun"
            raise BadInput(
                f"{phase} in {out} is {how_far}, at step {each.state.step}",
                hint="go on with --resume, or take another --out",
            )
    if "phase1" in found and out.is_dir():
        foreign = sorted(path.name for path in out.iterdir() if path.name != HEADS_ONLY)
        if foreign and not _is_log_of_adapters(out):
            raise BadInput(f"{out} is not empty: it holds {foreign[0]}", hint="take another --out")


def _is_log_of_adapters(out: Path) -> bool:
    """Whether a run of adapters left a log here, which it does before its first checkpoint."""
    try:
        return log.logged_settings(out, KIND) is not None
    except BadInput:
        return False
