"""The folder of a run: how far it is, and whether a phase may begin there."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.engines.adapters import checkpoint
from flatout.engines.adapters.checkpoint import PHASES, Checkpoint, Progress
from flatout.engines.adapters.config import AdaptConfig, check_unchanged, make_config
from flatout.errors import BadInput

HEADS_ONLY = "heads-only"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseStatus:
    """How far a phase is; `step` None: it has not begun, or was not kept yet."""

    name: str
    step: int | None = None
    steps: int | None = None
    finished: bool = False
    elapsed_s: float | None = None
    progress: dict[str, Progress] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """How far a run is."""

    out: str
    phases: tuple[PhaseStatus, ...]


def status(out: Path) -> Status:
    """How far the run in a folder is."""
    found = {phase: checkpoint.latest(out / phase) for phase in PHASES}
    if not any(found.values()):
        raise BadInput(f"{out} holds no run of adapters", hint="name the folder that train was given as out")
    return Status(out=str(out), phases=tuple(_status(phase, each) for phase, each in found.items()))


def _status(phase: str, found: Checkpoint | None) -> PhaseStatus:
    if found is None:
        return PhaseStatus(name=phase)
    state = found.state
    return PhaseStatus(
        name=phase,
        step=state.step,
        steps=state.steps,
        finished=state.finished,
        elapsed_s=state.elapsed_s,
        progress=state.progress,
    )


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


def config_of(out: Path, *, model: str | None = None, device: str | None = None) -> AdaptConfig:
    """The settings of the run in a folder; where it lies, and what it runs on, may have changed."""
    changed: dict[str, Any] = {"out": str(out)}
    changed |= {} if model is None else {"model": model}
    changed |= {"device": device or "auto"}
    return make_config({**furthest(out).state.config, **changed})


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
    """Whether a run that did not get to its first checkpoint left this folder."""
    try:
        first = (out / "log.jsonl").read_text(encoding="utf-8").partition("\n")[0]
        return bool(json.loads(first).get("format") == "flatout-adapters-log")
    except (OSError, ValueError, AttributeError):
        return False
