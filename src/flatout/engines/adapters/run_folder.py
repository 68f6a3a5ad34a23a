"""The folder of a run: how far the run is, and whether a phase may begin."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatout.engines.adapters.settings import AdaptSettings, check_resume, make_settings
from flatout.engines.adapters.training.records import (
    KIND,
    PHASES,
    BestSoFar,
    PhaseCheckpoint,
    StepRecord,
    checkpoints_of,
)
from flatout.engines.run import log
from flatout.engines.run.folder import check_empty
from flatout.ground.errors import BadInput

HEADS_ONLY = "heads-only"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseStatus:
    """How far a phase is; `step` None: no checkpoint yet, `logged_step` None: no report yet.

    A phase that has begun is running while its run lives, and interrupted otherwise; `begun` means that the
    file system cannot tell which.
    """

    name: str
    state: Literal["not begun", "begun", "going on", "interrupted", "finished"] = "not begun"
    step: int | None = None
    steps: int | None = None
    finished: bool = False
    logged_step: int | None = None
    elapsed_s: float | None = None
    progress: dict[str, BestSoFar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptStatus:
    """How far a run is; `resume` is the command that continues an interrupted one."""

    out: str
    phases: tuple[PhaseStatus, ...]
    resume: str | None = None


def read_status(out: Path) -> AdaptStatus:
    """Read how far the run in a folder is."""
    lives = log.is_written(out)
    found = latest_checkpoints(out)
    # In the order of the lines: a resumed run repeats steps, and its last line says where it is.
    logged = log.read_records(out, KIND) if log.has_log(out, KIND) else ()
    reports = {record.phase: record for record in logged}
    if not any(found.values()) and not reports and not lives:
        raise _no_run(out)
    phases = tuple(_phase_status(phase, found[phase], reports.get(phase), lives=lives) for phase in PHASES)
    stopped = any(each.state in ("interrupted", "begun") for each in phases)
    command = f"flatout adapt train {shlex.quote(str(out))} --resume"
    return AdaptStatus(out=str(out), phases=phases, resume=command if stopped else None)


def _phase_status(
    phase: str, found: PhaseCheckpoint | None, report: StepRecord | None, *, lives: bool | None
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


def latest_checkpoints(out: Path) -> dict[str, PhaseCheckpoint | None]:
    """Return the last checkpoint of every phase."""
    return {phase: checkpoints_of(out, phase).latest() for phase in PHASES}


def furthest(out: Path) -> PhaseCheckpoint:
    """Return the last checkpoint of the last phase that has one: it holds the run's best weights."""
    found = [each for each in latest_checkpoints(out).values() if each is not None]
    if not found:
        raise _no_run(out)
    return found[-1]


def saved_settings(out: Path) -> Mapping[str, Any] | None:
    """Return the settings of the last checkpoint in a folder; None before the first."""
    found = [each for each in latest_checkpoints(out).values() if each is not None]
    return found[-1].state.config if found else None


def settings_of(
    out: Path,
    *,
    model: str | None = None,
    device: str | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
) -> AdaptSettings:
    """Return the settings of the run in a folder, with another model, device or routing if given."""
    kept = furthest(out).state.config
    asked = {"top_k": top_k, "threshold": threshold}
    routing = {name: value for name, value in asked.items() if value is not None}
    changed = {"out": str(out), "device": device or "auto", "model": model or kept["model"]}
    return make_settings({**kept, **changed, "router": {**kept.get("router", {}), **routing}})


def without_adapters(settings: AdaptSettings) -> AdaptSettings:
    """Return the settings of the same run with heads alone, in its own folder."""
    return dataclasses.replace(settings, heads_only=True, out=str(settings.folder / HEADS_ONLY))


def phases_to_run(
    settings: AdaptSettings, phases: tuple[str, ...], *, resume: bool
) -> tuple[dict[str, PhaseCheckpoint | None], list[str]]:
    """Return (phases to run, each with the checkpoint it resumes from; notes on phases not run)."""
    out = settings.folder
    found = latest_checkpoints(out)
    if not resume:
        _check_fresh(out, {phase: found[phase] for phase in phases})
    for phase in PHASES[: PHASES.index(phases[0])]:
        done = found[phase]
        if done is None or not done.state.finished:
            raise BadInput(
                f"{phases[0]} needs {phase}, which is not finished in {out}",
                hint=f"--phase {phase.removeprefix('phase')} first, or --phase all",
            )
        check_resume(done.state.config, settings, phase=None)
    running: dict[str, PhaseCheckpoint | None] = {}
    notes = []
    for phase in phases:
        done = found[phase]
        if done is not None and done.state.finished:
            check_resume(done.state.config, settings, phase=phase)
            notes.append(f"{phase} is finished at step {done.state.step}: it is not trained again")
        else:
            running[phase] = done
    return running, notes


def _check_fresh(out: Path, found: dict[str, PhaseCheckpoint | None]) -> None:
    for phase, each in found.items():
        if each is not None:
            how_far = "finished" if each.state.finished else "begun"
            raise BadInput(
                f"{phase} in {out} is {how_far}, at step {each.state.step}",
                hint="continue with --resume, or choose another --out",
            )
    if "phase1" in found and not log.has_log(out, KIND):
        check_empty(out, besides=(HEADS_ONLY,))


def _no_run(out: Path) -> BadInput:
    return BadInput(f"{out} holds no run of adapters", hint="name the folder that train was given as out")
