"""The search for the batch of one group of stages.

The batch must divide every stage's effective batch, and what is divided away goes into accumulation.  A
suggestion is estimated at its own sizes before it is offered: reserved memory is not smooth in the batch, so
that a smaller batch fits is likely and not certain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flatout.decisions import Decision
from flatout.errors import BadInput
from flatout.memory.job import Recipe
from flatout.planner.batches import divisors, is_sensible, nearest_choices
from flatout.planner.budget import Budget
from flatout.planner.forecast import TRACED_ACCUMULATION, Forecast, LargestBatch, Peak, traced
from flatout.planner.remedies import does_not_fit, lower_sizes
from flatout.planner.settings import StageSettings
from flatout.planner.show import evaluation_recipe, job_sizes
from flatout.planner.suggestions import (
    EFFECTIVE,
    FASTEST,
    LARGEST,
    SAFEST,
    WITH,
    WITHOUT,
    EvaluationFit,
    GroupFit,
    Suggestion,
    Wish,
    merged,
)

SAFEST_SHARE = 0.8  # of what the margin leaves: room for a longer batch or another small process
NOTHING = LargestBatch(safe=None, limit=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bounds:
    """The largest batch where several are accumulated, and where one is the whole effective batch.

    In one piece no gradients wait while a batch runs, so that more may be safe.
    """

    pieces: LargestBatch
    whole: LargestBatch

    def of(self, suggestion: Suggestion) -> LargestBatch:
        in_one_piece = all(steps == 1 for steps in suggestion.accumulations.values())
        return self.whole if in_one_piece else self.pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSearch:
    """Stages that take their batch size from one place; the worst of them decides."""

    stages: tuple[StageSettings, ...]
    budget: Budget
    forecast: Forecast
    wish: Wish
    ranks: int
    lowered: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def checkpointing(self) -> bool:
        return any(stage.checkpointing.value for stage in self.stages)

    @property
    def common(self) -> int:
        """What the batch has to divide."""
        return math.gcd(*(self._per_rank(stage) for stage in self.stages))

    def _per_rank(self, stage: StageSettings) -> int:
        """The effective batch of one process."""
        if self.wish.effective_batch is not None:
            return self.wish.effective_batch // self.ranks
        return stage.batch_size.value * stage.accumulation.value

    def fit(self) -> GroupFit:
        """The suggestions of this group, or an error that says what would fit."""
        own_switch = self.checkpointing
        bounds = {switch: self._bounds(switch) for switch in (own_switch, not own_switch)}
        found = {switch: self._best(switch, bounds[switch]) for switch in bounds}
        other_asked = (
            self.wish.choose == (WITHOUT if own_switch else WITH) or "checkpointing" in self.wish.allow
        )
        use = own_switch if found[own_switch] or not other_asked else not own_switch
        best = found[use]
        if best is None:
            return self._lowered_or_raise()
        largest = bounds[use].of(best)
        safe = largest.safe or best.batch_size
        if not other_asked:
            self._check_sensible(best.batch_size, safe=safe)
        return GroupFit(
            stages=self.stages,
            safe=safe,
            limit=largest.limit,
            suggestions=merged(self._suggestions(found, use=use)),
            evaluation=self._evaluation(),
            lowered=self.lowered,
        )

    def _lowered_or_raise(self) -> GroupFit:
        lowered = {}
        if not self.lowered:
            lowered = lower_sizes(
                self.stages, budget=self.budget, forecast=self.forecast, allow=self.wish.allow
            )
        if not lowered:
            raise does_not_fit(self.stages, budget=self.budget, forecast=self.forecast)
        return dataclasses.replace(self, lowered=lowered).fit()

    def _suggestions(self, found: Mapping[bool, Suggestion | None], *, use: bool) -> Iterator[Suggestion]:
        timed = self._fastest(found)
        if timed is not None:
            yield timed
        current, other, plain = found[use], found[not use], found[False]
        assert current is not None
        yield current
        if timed is None and plain is not None:
            reason = "largest batch without computing activations twice; not timed"
            yield plain.named(FASTEST, reason, source="assumed")
        room_bytes = int(self.budget.usable_bytes * SAFEST_SHARE)
        safest = self._best(use, self._bounds(use, capacity_bytes=room_bytes), capacity_bytes=room_bytes)
        if safest is not None:
            reason = f"keeps a further {1 - SAFEST_SHARE:.0%} free, for a longer batch or a neighbour"
            yield safest.named(SAFEST, reason)
        if other is not None:
            does = "computes activations twice" if other.checkpointing else "keeps all activations"
            yield other.named(WITH if other.checkpointing else WITHOUT, does)
        yield from self._widest(use)

    def _recipe(self, stage: StageSettings, *, checkpointing: bool, accumulation: int) -> Recipe:
        switched = stage.checkpointing.value if checkpointing == self.checkpointing else checkpointing
        return traced(dataclasses.replace(stage.recipe, checkpointing=switched, accumulation=accumulation))

    def _sizes(self, stage: StageSettings, *, batch_size: int) -> dict[str, int]:
        over = self.lowered.get(stage.name)
        return job_sizes(stage, self.forecast, batch_size=batch_size, over=over)

    def _largest(
        self,
        checkpointing: bool,
        *,
        accumulation: int = TRACED_ACCUMULATION,
        capacity_bytes: int | None = None,
    ) -> LargestBatch:
        """The largest batch of the worst stage."""
        capacity = self.budget.usable_bytes if capacity_bytes is None else capacity_bytes
        found = []
        try:
            for stage in self.stages:
                recipes = [self._recipe(stage, checkpointing=checkpointing, accumulation=accumulation)]
                if stage.eval_batch_size is None:  # evaluation goes through the same loader
                    recipes.append(evaluation_recipe(stage))
                sizes = self._sizes(stage, batch_size=1)
                found += [
                    self.forecast.largest_batch(sizes, recipe=recipe, capacity_bytes=capacity)
                    for recipe in recipes
                ]
        except BadInput:
            if checkpointing == self.checkpointing:
                raise
            return NOTHING  # the model cannot be switched from outside
        return LargestBatch(safe=_least(one.safe for one in found), limit=_least(one.limit for one in found))

    def _bounds(self, checkpointing: bool, *, capacity_bytes: int | None = None) -> _Bounds:
        pieces = self._largest(checkpointing, capacity_bytes=capacity_bytes)
        common = self.common
        alike = all(self._per_rank(stage) == common for stage in self.stages)
        if not alike or common <= (pieces.safe or 0):
            return _Bounds(pieces=pieces, whole=pieces)
        whole = self._largest(checkpointing, accumulation=1, capacity_bytes=capacity_bytes)
        return _Bounds(pieces=pieces, whole=whole)

    def _best(
        self, checkpointing: bool, bounds: _Bounds, *, capacity_bytes: int | None = None
    ) -> Suggestion | None:
        """The largest batch that keeps every effective batch; None where nothing fits."""
        capacity = self.budget.usable_bytes if capacity_bytes is None else capacity_bytes
        common = self.common
        for batch_size in divisors(common):
            largest = bounds.whole if batch_size == common else bounds.pieces
            if batch_size > (largest.safe or 0):
                continue
            found = self._assess(batch_size, checkpointing=checkpointing)
            if found.peak.process_bytes <= capacity:
                return found
        return None

    def _check_sensible(self, batch_size: int, *, safe: int) -> None:
        current = self.stages[0].batch_size.value
        if batch_size >= min(current, safe) or is_sensible(batch_size, safe=safe):
            return
        effective = self.common * self.ranks
        choices = nearest_choices(effective, safe=safe, ranks=self.ranks)
        raise BadInput(
            f"the effective batch of {effective} cannot be kept: a batch of up to {safe} is safe, and the "
            f"largest that divides it is {batch_size}",
            hint=f"change it with --effective; nearest: {', '.join(map(str, choices))}",
        )

    def _assess(
        self, batch_size: int, *, checkpointing: bool, accumulations: Mapping[str, int] | None = None
    ) -> Suggestion:
        """Every stage at this batch."""
        steps = accumulations or {stage.name: self._per_rank(stage) // batch_size for stage in self.stages}
        peaks: dict[str, Peak] = {}
        seconds: list[float | None] = []
        for stage in self.stages:
            recipe = self._recipe(stage, checkpointing=checkpointing, accumulation=steps[stage.name])
            sizes = self._sizes(stage, batch_size=batch_size)
            peaks[stage.name] = self.forecast.peak_bytes(sizes, recipe=recipe)
            micro_s = self.forecast.step_s(sizes, recipe=recipe)
            seconds.append(None if micro_s is None else micro_s * steps[stage.name])
        worst = max(peaks, key=lambda name: peaks[name].process_bytes)
        known = [second for second in seconds if second is not None]
        reason = "the largest safe batch that divides the effective batch"
        return Suggestion(
            names=(LARGEST,),
            batch_size=batch_size,
            accumulations=steps,
            effective_batches={name: batch_size * count * self.ranks for name, count in steps.items()},
            checkpointing=checkpointing,
            peak=peaks[worst],
            worst_stage=worst,
            step_s=max(known) if len(known) == len(seconds) else None,
            keeps_effective_batch=True,
            reason=Decision(value=LARGEST, reason=reason, source="computed"),
        )

    def _fastest(self, found: Mapping[bool, Suggestion | None]) -> Suggestion | None:
        """Of everything that was timed, and that the config can say, the quickest; None where nothing was."""
        can_switch = all(stage.checkpointing.place is not None for stage in self.stages)
        timed = []
        for switch, best in found.items():
            if best is None or best.step_s is None or not (can_switch or switch == self.checkpointing):
                continue
            smaller = [number for number in divisors(self.common) if number <= best.batch_size]
            timed += [self._assess(number, checkpointing=switch) for number in smaller]
        usable = self.budget.usable_bytes
        timed = [one for one in timed if one.step_s is not None and one.peak.process_bytes <= usable]
        if not timed:
            return None
        quickest = min(timed, key=lambda one: (one.step_s or math.inf, -one.batch_size))
        return quickest.named(FASTEST, "the shortest step that was measured", source="measured")

    def _widest(self, checkpointing: bool) -> Iterator[Suggestion]:
        """The whole safe batch at the configured accumulation: it changes the effective batch."""
        steps = {stage.name: stage.accumulation.value for stage in self.stages}
        safe = self._largest(checkpointing, accumulation=max(steps.values())).safe
        if safe is None:
            return
        found = self._assess(safe, checkpointing=checkpointing, accumulations=steps)
        kept = {stage.name: self._per_rank(stage) * self.ranks for stage in self.stages}
        wider = all(found.effective_batches[name] > effective for name, effective in kept.items())
        if wider and found.peak.process_bytes <= self.budget.usable_bytes:
            effective = max(found.effective_batches.values())
            reason = f"changes the objective, so it is written only with --effective {effective}"
            yield dataclasses.replace(found.named(EFFECTIVE, reason), keeps_effective_batch=False)

    def _evaluation(self) -> EvaluationFit:
        configured = max(stage.eval_batch for stage in self.stages)
        safe = _least(
            self.forecast.largest_batch(
                self._sizes(stage, batch_size=1),
                recipe=evaluation_recipe(stage),
                capacity_bytes=self.budget.usable_bytes,
            ).safe
            for stage in self.stages
        )
        suggested, reason = None, "kept: some metrics depend on it (--allow eval_batch_size raises it)"
        if any(stage.eval_batch_size is None for stage in self.stages):
            reason = "it has no size of its own and uses the batch of training"
        elif safe is not None and configured > safe:
            suggested, reason = safe, "the configured size does not fit"
        elif safe is not None and "eval_batch_size" in self.wish.allow and safe > configured:
            suggested, reason = safe, "raised, as allowed on the command line"
        return EvaluationFit(batch_size=configured, largest_safe=safe, suggested=suggested, reason=reason)


def _least(numbers: Iterator[int | None]) -> int | None:
    """The least of all; None if one is."""
    given = list(numbers)
    known = [number for number in given if number is not None]
    return min(known) if len(known) == len(given) else None
