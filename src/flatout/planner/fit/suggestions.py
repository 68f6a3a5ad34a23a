"""What a fit is asked and what it answers: wishes beyond the config, suggestions per group of stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flatout.decisions import Decision, Source
from flatout.errors import BadInput
from flatout.planner.config.settings import Settings, StageSettings
from flatout.planner.fit.budget import Budget
from flatout.planner.forecast.questions import Peak

LARGEST, FASTEST, SAFEST, EFFECTIVE = "largest batch", "fastest", "safest", "largest effective batch"
WITH, WITHOUT = "with checkpointing", "without checkpointing"
NAMES = (LARGEST, FASTEST, SAFEST, WITH, WITHOUT, EFFECTIVE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One way to train a group of stages, with what it is predicted to need."""

    names: tuple[str, ...]
    batch_size: int
    accumulations: Mapping[str, int]  # by stage
    effective_batches: Mapping[str, int]  # by stage, over all ranks
    checkpointing: bool
    peak: Peak  # of the worst stage
    peaks: Mapping[str, Peak]  # by stage; a stage that another covers is asked for the chosen batch only
    worst_stage: str
    step_s: float | None  # measured seconds of one optimizer step of the slowest stage
    keeps_effective_batch: bool
    reason: Decision[str]

    def named(self, name: str, reason: str, *, source: Source = "computed") -> Suggestion:
        decision = Decision(value=name, reason=reason, source=source)
        return dataclasses.replace(self, names=(name,), reason=decision)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFit:
    """Evaluation keeps no activations for a backward pass, so it has a size of its own."""

    batch_size: int  # as configured; that of training where there is no other
    largest: int | None  # that fits; None where it was not asked for
    suggested: int | None  # None: leave it
    peak: Peak
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFit:
    """Stages that share a batch size, and what they could train with."""

    stages: tuple[StageSettings, ...]
    largest: int  # the largest batch that fits, at the first suggestion's checkpointing
    safe: int | None  # the largest with which the process never holds more than the margin
    suggestions: tuple[Suggestion, ...]
    evaluation: EvaluationFit
    lowered: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # stage -> allowed size -> value
    caution: str | None = None  # why the margin is not used up

    @property
    def checkpointing(self) -> bool:
        """As configured; stages that differ keep to their own until a suggestion switches all."""
        return any(stage.checkpointing.value for stage in self.stages)

    def suggestion(self, name: str | None) -> Suggestion:
        """The suggestion of that name; without one, the first that keeps the effective batch."""
        for suggestion in self.suggestions:
            if name in suggestion.names or (name is None and suggestion.keeps_effective_batch):
                return suggestion
        known = ", ".join(known for suggestion in self.suggestions for known in suggestion.names)
        raise BadInput(f"there is no suggestion {name!r}", hint=f"choose one of: {known}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A config made to fit a device."""

    settings: Settings
    budget: Budget
    groups: tuple[GroupFit, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What the user asked for beyond the config."""

    effective_batch: int | None = None  # over all ranks
    allow: tuple[str, ...] = ()  # knobs that may be changed although they are part of the objective
    choose: str | None = None  # the name of a suggestion


def merged(suggestions: Iterable[Suggestion]) -> tuple[Suggestion, ...]:
    """Equal suggestions under all their names, the first one's reason kept."""
    found: dict[tuple[object, ...], Suggestion] = {}
    for one in suggestions:
        key = (one.batch_size, tuple(one.accumulations.items()), one.checkpointing)
        if key in found:
            names = tuple(dict.fromkeys([*found[key].names, *one.names]))
            found[key] = dataclasses.replace(found[key], names=names)
        else:
            found[key] = one
    return tuple(found.values())
