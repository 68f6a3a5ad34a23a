"""The question and the answer of a fit: wishes beyond the config, suggestions per group of stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flatout.ground.decisions import Decision, Source
from flatout.ground.errors import BadInput
from flatout.memory.predict.forecast import Peak
from flatout.planner.config.settings import Settings, StageSettings
from flatout.planner.fit.fits import Budget

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

    batch_size: int  # as configured; by default that of training
    largest: int | None  # that fits; None if it was not asked for
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
        """Return the suggestion of that name; without a name, the first that keeps the effective batch."""
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


def merge_equal(suggestions: Iterable[Suggestion]) -> tuple[Suggestion, ...]:
    """Join equal suggestions under all their names, with the first one's reason."""
    found: dict[tuple[object, ...], Suggestion] = {}
    for one in suggestions:
        key = (one.batch_size, tuple(one.accumulations.items()), one.checkpointing)
        if key in found:
            names = tuple(dict.fromkeys([*found[key].names, *one.names]))
            found[key] = dataclasses.replace(found[key], names=names)
        else:
            found[key] = one
    return tuple(found.values())


# A divisor below this share of what fits leaves so much of the device idle that it is no answer.
SENSIBLE_SHARE = 0.25


def divisors(number: int) -> list[int]:
    """List all divisors, largest first."""
    low = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    high = [number // i for i in low if i * i != number]
    return [*high, *reversed(low)]


def largest_divisor(number: int, *, at_most: int) -> int | None:
    return next((divisor for divisor in divisors(number) if divisor <= at_most), None)


def is_sensible(batch_size: int, *, largest: int) -> bool:
    return batch_size >= largest * SENSIBLE_SHARE


def nearest_batches(per_rank: int, *, largest: int) -> list[tuple[int, int]]:
    """List batches and accumulations that make about `per_rank`: a bit less, a bit more, the fullest."""
    # Every multiple of `largest` qualifies, so a walk of `largest` steps to either side must end.
    below = _first(range(per_rank - 1, max(per_rank - largest, 0) - 1, -1), largest=largest)
    above = _first(range(per_rank + 1, per_rank + largest + 1), largest=largest)
    fullest = (largest, max(1, round(per_rank / largest)))
    found = dict.fromkeys(pair for pair in (below, above, fullest) if pair is not None)
    return [(batch, steps) for batch, steps in found if batch * steps != per_rank]


def _first(numbers: range, *, largest: int) -> tuple[int, int] | None:
    for number in numbers:
        divisor = largest_divisor(number, at_most=largest) if number > 0 else None
        if divisor is not None and 2 * divisor >= min(largest, number):
            return divisor, number // divisor
    return None


def learning_rate_rule(before: int, after: int, *, learning_rate: float | None) -> str:
    """State the usual rule for the learning rate when the effective batch changes."""
    ratio = after / before
    change = f"the effective batch goes from {before} to {after} (×{ratio:.3g})"
    if learning_rate is None:
        factors = (
            f"×{ratio:.3g} by the linear rule (SGD), ×{math.sqrt(ratio):.3g} by the square-root rule (Adam)"
        )
        return f"{change}; the learning rate is left alone: {factors}"
    linear, root = learning_rate * ratio, learning_rate * math.sqrt(ratio)
    return (
        f"{change}; the learning rate {learning_rate:g} is left alone: the linear rule (SGD) would give "
        f"{linear:.3g}, the square-root rule (Adam) {root:.3g}"
    )
