"""The search for the batch of one group of stages.

The batch must divide every stage's effective batch, and what is divided away goes into accumulation.  A
suggestion is estimated at its own sizes before it is offered: reserved memory is not smooth in the batch, so
that a smaller batch fits is likely and not certain.

Every question costs traces, so few are asked.  A stage whose sizes are nowhere above those of another is left
out of the search and only checked at the batch that was found.  Evaluation that shares the loader of training
is asked whether it takes that batch, not how much it would take.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flatout.decisions import Decision
from flatout.errors import BadInput
from flatout.memory.forecast import SCATTER
from flatout.memory.job import Recipe
from flatout.planner.batches import divisors, is_sensible, nearest_choices
from flatout.planner.budget import Budget
from flatout.planner.covering import uncovered
from flatout.planner.forecast import TRACED_ACCUMULATION, Forecast, LargestBatch, Peak, traced
from flatout.planner.progress import PEAK, SEARCH, Progress
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
from flatout.units import show_share

SAFEST_SHARE = 0.8  # of what the margin leaves: room for a longer batch or another small process
# Gradients that wait are at most half of what a step holds, since the parameters are as large as they are: in
# one piece no step fits that needs more than this many times the capacity in several.
MOST_WAITING = 1.5
NOTHING = LargestBatch(safe=None, limit=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Best:
    """The largest batch that keeps every effective batch, and how far a batch could go."""

    largest: LargestBatch
    suggestion: Suggestion | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSearch:
    """Stages that take their batch size from one place; the worst of them decides."""

    stages: tuple[StageSettings, ...]
    budget: Budget
    forecast: Forecast
    wish: Wish
    ranks: int
    lowered: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    deciding: tuple[StageSettings, ...] = ()  # () for those that no other covers

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
        if not self.deciding:
            deciding = uncovered(
                self.stages, sizes_of=lambda stage: self._sizes(stage, batch_size=1), ways_of=self._ways
            )
            return dataclasses.replace(self, deciding=deciding).fit()
        own_switch = self.checkpointing
        found = {switch: self._best(switch) for switch in (own_switch, not own_switch)}
        other_asked = (
            self.wish.choose == (WITHOUT if own_switch else WITH) or "checkpointing" in self.wish.allow
        )
        use = own_switch if found[own_switch].suggestion or not other_asked else not own_switch
        best = found[use].suggestion
        if best is None:
            return self._lowered_or_raise()
        safe = max(found[use].largest.safe or 0, best.batch_size)
        if not other_asked:
            self._check_sensible(best.batch_size, safe=safe)
        whole_group = self._of_all(best)
        if whole_group is None:  # a stage that seemed covered needs more than the one that covers it
            return dataclasses.replace(self, deciding=self.stages).fit()
        found[use] = dataclasses.replace(found[use], suggestion=whole_group)
        return GroupFit(
            stages=self.stages,
            safe=safe,
            limit=found[use].largest.limit,
            suggestions=merged(self._suggestions(found, use=use)),
            evaluation=self._evaluation(whole_group),
            lowered=self.lowered,
        )

    def _ways(self, stage: StageSettings) -> tuple[object, ...]:
        """How a stage is trained and evaluated, sizes aside."""
        recipes = (self._recipe(stage, checkpointing=switch, accumulation=1) for switch in (False, True))
        return (*recipes, stage.eval_batch_size is None, id(self.forecast.of_stage(stage.name)))

    def _of_all(self, best: Suggestion) -> Suggestion | None:
        """The suggestion with every stage estimated; None where one needs more than those that decided."""
        others = [stage for stage in self.stages if stage not in self.deciding]
        if not others:
            return best
        names = dict.fromkeys(stage.name for stage in others)
        self.progress.ask(f"{_named(others)} at batch {best.batch_size}")
        peaks = dict(best.peaks)
        for stage in others:
            recipe = self._recipe(
                stage, checkpointing=best.checkpointing, accumulation=best.accumulations[stage.name]
            )
            sizes = self._sizes(stage, batch_size=best.batch_size)
            peaks[stage.name] = self.forecast.of_stage(stage.name).peak_bytes(sizes, recipe=recipe)
        if any(peaks[name].process_bytes > best.peak.process_bytes for name in names):
            return None
        return dataclasses.replace(best, peaks={stage.name: peaks[stage.name] for stage in self.stages})

    def _lowered_or_raise(self) -> GroupFit:
        lowered = {}
        self.progress.ask("what would fit")
        if not self.lowered:
            lowered = lower_sizes(
                self.stages, budget=self.budget, forecast=self.forecast, allow=self.wish.allow
            )
        if not lowered:
            raise does_not_fit(self.stages, budget=self.budget, forecast=self.forecast)
        return dataclasses.replace(self, lowered=lowered, deciding=()).fit()

    def _suggestions(self, found: Mapping[bool, _Best], *, use: bool) -> Iterator[Suggestion]:
        timed = self._fastest(found)
        if timed is not None:
            yield timed
        current, other, plain = (found[switch].suggestion for switch in (use, not use, False))
        assert current is not None
        yield current
        if timed is None and plain is not None:
            reason = "largest batch without computing activations twice; not timed"
            yield plain.named(FASTEST, reason, source="assumed")
        safest = self._within(current, capacity_bytes=int(self.budget.usable_bytes * SAFEST_SHARE))
        if safest is not None:
            reason = f"keeps a further {show_share(1 - SAFEST_SHARE)} free, for a longer batch or a neighbour"
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

    def _largest(self, checkpointing: bool, *, accumulation: int = TRACED_ACCUMULATION) -> LargestBatch:
        """The largest batch of the worst stage, evaluation included where it goes through the same loader."""
        capacity = self.budget.usable_bytes
        found = []
        for stage in self.deciding:
            recipe = self._recipe(stage, checkpointing=checkpointing, accumulation=accumulation)
            sizes = self._sizes(stage, batch_size=1)
            found.append(
                self.forecast.of_stage(stage.name).largest_batch(
                    sizes, recipe=recipe, capacity_bytes=capacity
                )
            )
        safe, limit = _least(one.safe for one in found), _least(one.limit for one in found)
        for stage in self.deciding:
            if safe is None or stage.eval_batch_size is not None:
                continue
            sizes = self._sizes(stage, batch_size=safe)
            if self._evaluated(stage, sizes).process_bytes > capacity:
                bound = self.forecast.of_stage(stage.name).largest_batch(
                    sizes, recipe=evaluation_recipe(stage), capacity_bytes=capacity
                )
                safe, limit = _least([safe, bound.safe]), _least([limit, bound.limit])
        return LargestBatch(safe=safe, limit=limit)

    def _evaluated(self, stage: StageSettings, sizes: Mapping[str, int]) -> Peak:
        return self.forecast.of_stage(stage.name).peak_bytes(sizes, recipe=evaluation_recipe(stage))

    def _best(self, checkpointing: bool) -> _Best:
        """The largest batch that keeps every effective batch; none where the model has no switch for it."""
        switch = ("without", "with")[checkpointing]
        self.progress.ask(f"{_named(self.deciding)}, largest batch {switch} checkpointing")
        try:
            return self._searched(checkpointing)
        except BadInput:
            if checkpointing == self.checkpointing:
                raise
            return _Best(largest=NOTHING)

    def _searched(self, checkpointing: bool) -> _Best:
        whole = NOTHING
        if self._in_one_piece and all(stage.accumulation.value == 1 for stage in self.stages):
            whole = self._largest(checkpointing, accumulation=1)
            if (whole.safe or 0) >= self.common:
                return _Best(largest=whole, suggestion=self._assess(self.common, checkpointing=checkpointing))
        pieces = self._largest(checkpointing)
        for batch_size in divisors(self.common):
            if batch_size > (pieces.safe or 0):
                if batch_size < self.common or whole is not NOTHING or not self._in_one_piece:
                    continue
                found = self._whole(checkpointing)
            else:
                found = self._assess(batch_size, checkpointing=checkpointing)
            if found is not None and found.peak.process_bytes <= self.budget.usable_bytes:
                return _Best(largest=pieces, suggestion=found)
        return _Best(largest=pieces)

    @property
    def _in_one_piece(self) -> bool:
        """Whether one batch can be the whole effective batch of every stage."""
        return all(self._per_rank(stage) == self.common for stage in self.stages)

    def _whole(self, checkpointing: bool) -> Suggestion | None:
        """The whole effective batch in one piece, where no gradients wait, so that more may be safe."""
        safe_bytes = int(self.budget.usable_bytes * (1 - SCATTER))
        for stage in self.deciding:
            sizes = self._sizes(stage, batch_size=self.common)
            recipe = self._recipe(stage, checkpointing=checkpointing, accumulation=TRACED_ACCUMULATION)
            if (
                self.forecast.of_stage(stage.name).peak_bytes(sizes, recipe=recipe).process_bytes
                > MOST_WAITING * safe_bytes
            ):
                return None
        found = self._assess(self.common, checkpointing=checkpointing)
        if found.peak.process_bytes > safe_bytes:
            return None
        shares_loader = any(stage.eval_batch_size is None for stage in self.deciding)
        fits = not shares_loader or self._evaluation_peak(self.common).process_bytes <= safe_bytes
        return found if fits else None

    def _within(self, best: Suggestion, *, capacity_bytes: int) -> Suggestion | None:
        """The largest divisor up to that of `best` within a tighter capacity; it follows from the search."""
        if best.peak.process_bytes <= capacity_bytes:
            return best
        smaller = (number for number in divisors(self.common) if number < best.batch_size)
        assessed = (self._assess(number, checkpointing=best.checkpointing) for number in smaller)
        return next((one for one in assessed if one.peak.process_bytes <= capacity_bytes), None)

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
        """Every stage that decides, at this batch."""
        steps = accumulations or {stage.name: self._per_rank(stage) // batch_size for stage in self.stages}
        peaks: dict[str, Peak] = {}
        seconds: list[float | None] = []
        for stage in self.deciding:
            recipe = self._recipe(stage, checkpointing=checkpointing, accumulation=steps[stage.name])
            sizes = self._sizes(stage, batch_size=batch_size)
            peaks[stage.name] = self.forecast.of_stage(stage.name).peak_bytes(sizes, recipe=recipe)
            micro_s = self.forecast.of_stage(stage.name).step_s(sizes, recipe=recipe)
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
            peaks=peaks,
            worst_stage=worst,
            step_s=max(known) if len(known) == len(seconds) else None,
            keeps_effective_batch=True,
            reason=Decision(value=LARGEST, reason=reason, source="computed"),
        )

    def _fastest(self, found: Mapping[bool, _Best]) -> Suggestion | None:
        """Of everything that was timed, and that the config can say, the quickest; None where nothing was."""
        can_switch = all(stage.checkpointing.place is not None for stage in self.stages)
        timed = []
        for switch, best in ((switch, one.suggestion) for switch, one in found.items()):
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

    def _evaluation(self, best: Suggestion) -> EvaluationFit:
        self.progress.ask(f"{_named(self.deciding)}, evaluation")
        configured = max(stage.eval_batch for stage in self.stages)
        if any(stage.eval_batch_size is None for stage in self.stages):
            return EvaluationFit(
                batch_size=best.batch_size,
                largest_safe=None,
                suggested=None,
                peak=self._evaluation_peak(best.batch_size),
                reason="it has no size of its own and uses the batch of training",
            )
        safe = _least(
            self.forecast.of_stage(stage.name)
            .largest_batch(
                self._sizes(stage, batch_size=1),
                recipe=evaluation_recipe(stage),
                capacity_bytes=self.budget.usable_bytes,
            )
            .safe
            for stage in self.deciding
        )
        suggested, reason = None, "kept: some metrics depend on it (--allow eval_batch_size raises it)"
        if safe is not None and configured > safe:
            suggested, reason = safe, "the configured size does not fit"
        elif safe is not None and "eval_batch_size" in self.wish.allow and safe > configured:
            suggested, reason = safe, "raised, as allowed on the command line"
        return EvaluationFit(
            batch_size=configured,
            largest_safe=safe,
            suggested=suggested,
            peak=self._evaluation_peak(suggested or configured),
            reason=reason,
        )

    def _evaluation_peak(self, batch_size: int) -> Peak:
        peaks = [self._evaluated(stage, self._sizes(stage, batch_size=batch_size)) for stage in self.deciding]
        return max(peaks, key=lambda peak: peak.process_bytes)


def expected_traces(stages: Sequence[StageSettings]) -> list[int]:
    """Of a group's questions: both sides of checkpointing, the stages that were left out, evaluation."""
    left_out = [PEAK] if len(stages) > 1 else []
    return [SEARCH, SEARCH, *left_out, PEAK if stages[0].eval_batch_size is None else SEARCH]


def _named(stages: Sequence[StageSettings]) -> str:
    names = [stage.name for stage in stages]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _least(numbers: Iterable[int | None]) -> int | None:
    """The least of all; None if one is."""
    given = list(numbers)
    known = [number for number in given if number is not None]
    return min(known) if len(known) == len(given) else None
