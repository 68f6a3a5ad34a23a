"""The search for the batch of one group of stages.

The batch must divide every stage's effective batch, and what is divided away goes into accumulation.  A
suggestion is judged at its own sizes before it is offered: reserved memory is not smooth in the batch, so a
smaller batch probably fits but need not.

Every question costs traces, so few are asked.  A stage whose sizes are nowhere above those of another is left
out of the search and only checked at the batch that was found.  Evaluation that shares the loader of training
is asked whether it takes that batch, not how much it would take.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.ground.units import show_share
from flatout.memory.jobs.job import Recipe
from flatout.memory.predict.forecast import TRACED_ACCUMULATION, BatchBounds, Peak, limit_accumulation
from flatout.planner.config.settings import StageSettings
from flatout.planner.fit.fits import Judge, evaluation_recipe, job_sizes, least
from flatout.planner.fit.progress import PEAK, SEARCH, Progress
from flatout.planner.fit.remedies import does_not_fit, lower_sizes
from flatout.planner.fit.suggestions import (
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
    divisors,
    is_sensible,
    merge_equal,
    nearest_batches,
)

SAFEST_SHARE = 0.8  # of the margin, which this one never holds more than
# Gradients that wait are at most half of what a step holds, since the parameters are as large as they are: in
# one piece no step fits that needs more than this many times the capacity in several.
MOST_WAITING = 1.5
NOTHING = BatchBounds(safe=None, tight=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Best:
    """The largest batch that keeps every effective batch, and how far a batch could go."""

    largest: BatchBounds
    suggestion: Suggestion | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSearch:
    """Stages that take their batch size from one place; the worst of them decides."""

    stages: tuple[StageSettings, ...]
    judge: Judge
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
        """Return the effective batch of one process."""
        if self.wish.effective_batch is not None:
            return self.wish.effective_batch // self.ranks
        return stage.batch_size.value * stage.accumulation.value

    def fit(self) -> GroupFit:
        """Return the suggestions of this group; raise an error that says what would fit."""
        if not self.deciding:
            deciding = find_uncovered(
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
        largest = max(found[use].largest.tight or 0, best.batch_size)
        if not other_asked:
            self._check_sensible(best.batch_size, largest=largest)
        whole_group = self._of_all(best)
        if whole_group is None:  # a stage that seemed covered needs more than the one that covers it
            return dataclasses.replace(self, deciding=self.stages).fit()
        found[use] = dataclasses.replace(found[use], suggestion=whole_group)
        suggestions = merge_equal(self._suggestions(found, use=use))
        self.progress.ask(f"{_name_stages(self.deciding)}, evaluation")
        return GroupFit(
            stages=self.stages,
            largest=largest,
            safe=found[use].largest.safe,
            suggestions=suggestions,
            evaluation=fit_evaluation(
                self.deciding,
                judge=self.judge,
                training_batch=whole_group.batch_size,
                may_raise="eval_batch_size" in self.wish.allow,
                lowered=self.lowered,
            ),
            lowered=self.lowered,
            caution=self._caution,
        )

    @property
    def _caution(self) -> str | None:
        return next(filter(None, map(self.judge.caution, self.stages)), None)

    def _ways(self, stage: StageSettings) -> tuple[object, ...]:
        """Return how a stage is trained and evaluated, sizes aside."""
        recipes = (self._recipe(stage, checkpointing=switch, accumulation=1) for switch in (False, True))
        return (*recipes, stage.eval_batch_size is None, id(self.judge.forecast.of_stage(stage.name)))

    def _of_all(self, best: Suggestion) -> Suggestion | None:
        """Estimate every stage; None if one needs more than those that decided."""
        others = [stage for stage in self.stages if stage not in self.deciding]
        if not others:
            return best
        self.progress.ask(f"{_name_stages(others)} at batch {best.batch_size}")
        peaks = dict(best.peaks)
        for stage in others:
            step = self._step_of(stage, best)
            peaks[stage.name] = self.judge.held(self.judge.peak(stage, *step))
            if not self.judge.fits(stage, *step):
                return None
        if any(peaks[stage.name].process_bytes > best.peak.process_bytes for stage in others):
            return None
        return dataclasses.replace(best, peaks={stage.name: peaks[stage.name] for stage in self.stages})

    def _lowered_or_raise(self) -> GroupFit:
        lowered = {}
        self.progress.ask("what would fit")
        if not self.lowered:
            lowered = lower_sizes(self.stages, judge=self.judge, allow=self.wish.allow)
        if not lowered:
            raise does_not_fit(self.stages, judge=self.judge)
        return dataclasses.replace(self, lowered=lowered, deciding=()).fit()

    def _suggestions(self, found: Mapping[bool, _Best], *, use: bool) -> Iterator[Suggestion]:
        timed = self._fastest(found)
        if timed is not None:
            yield timed
        current, other, plain = (found[switch].suggestion for switch in (use, not use, False))
        assert current is not None
        yield current
        if timed is None and plain is not None:
            reason = "largest batch that recomputes no activations; not timed"
            yield plain.named(FASTEST, reason, source="assumed")
        safest = self._within(current, capacity_bytes=int(self.judge.budget.usable_bytes * SAFEST_SHARE))
        if safest is not None:
            reason = f"never holds more than {show_share(SAFEST_SHARE)} of the margin: room for a neighbour"
            yield safest.named(SAFEST, reason)
        if other is not None:
            does = "computes activations twice" if other.checkpointing else "keeps all activations"
            yield other.named(WITH if other.checkpointing else WITHOUT, does)
        yield from self._widest(use)

    def _recipe(self, stage: StageSettings, *, checkpointing: bool, accumulation: int) -> Recipe:
        switched = stage.checkpointing.value if checkpointing == self.checkpointing else checkpointing
        return limit_accumulation(
            dataclasses.replace(stage.recipe, checkpointing=switched, accumulation=accumulation)
        )

    def _sizes(self, stage: StageSettings, *, batch_size: int) -> dict[str, int]:
        over = self.lowered.get(stage.name)
        return job_sizes(stage, self.judge.forecast, batch_size=batch_size, over=over)

    def _step(
        self, stage: StageSettings, batch_size: int, *, checkpointing: bool, accumulation: int
    ) -> tuple[dict[str, int], Recipe]:
        """Return sizes and recipe of one step, as the judge takes them."""
        recipe = self._recipe(stage, checkpointing=checkpointing, accumulation=accumulation)
        return self._sizes(stage, batch_size=batch_size), recipe

    def _step_of(self, stage: StageSettings, suggestion: Suggestion) -> tuple[dict[str, int], Recipe]:
        return self._step(
            stage,
            suggestion.batch_size,
            checkpointing=suggestion.checkpointing,
            accumulation=suggestion.accumulations[stage.name],
        )

    def _largest(self, checkpointing: bool, *, accumulation: int = TRACED_ACCUMULATION) -> BatchBounds:
        """Find the largest batch of the worst stage, evaluation included if it shares the loader."""
        return least(
            self.judge.largest_of_loader(
                stage, *self._step(stage, 1, checkpointing=checkpointing, accumulation=accumulation)
            )
            for stage in self.deciding
        )

    def _best(self, checkpointing: bool) -> _Best:
        """Find the largest batch that keeps every effective batch; none if the model has no such switch."""
        switch = ("without", "with")[checkpointing]
        self.progress.ask(f"{_name_stages(self.deciding)}, largest batch {switch} checkpointing")
        try:
            return self._search(checkpointing)
        except BadInput:
            if checkpointing == self.checkpointing:
                raise
            return _Best(largest=NOTHING)

    def _search(self, checkpointing: bool) -> _Best:
        whole = NOTHING
        if self._in_one_piece and all(stage.accumulation.value == 1 for stage in self.stages):
            whole = self._largest(checkpointing, accumulation=1)
            if (whole.tight or 0) >= self.common:
                return _Best(largest=whole, suggestion=self._assess(self.common, checkpointing=checkpointing))
        pieces = self._largest(checkpointing)
        for batch_size in divisors(self.common):
            if batch_size > (pieces.tight or 0):
                if batch_size < self.common or whole is not NOTHING or not self._in_one_piece:
                    continue
                found = self._whole(checkpointing)
            else:
                found = self._assess(batch_size, checkpointing=checkpointing)
            if found is not None and self._fits(found):
                return _Best(largest=pieces, suggestion=found)
        return _Best(largest=pieces)

    @property
    def _in_one_piece(self) -> bool:
        """Whether one batch can be the whole effective batch of every stage."""
        return all(self._per_rank(stage) == self.common for stage in self.stages)

    def _whole(self, checkpointing: bool) -> Suggestion | None:
        """Assess the whole effective batch in one piece: no gradients wait, so more may fit."""
        for stage in self.deciding:
            step = self._step(
                stage, self.common, checkpointing=checkpointing, accumulation=TRACED_ACCUMULATION
            )
            if self.judge.peak(stage, *step).allocated_bytes > MOST_WAITING * self.judge.budget.usable_bytes:
                return None
        found = self._assess(self.common, checkpointing=checkpointing)
        evaluated = all(
            self.judge.fits(stage, self._sizes(stage, batch_size=self.common), evaluation_recipe(stage))
            for stage in self.deciding
            if stage.eval_batch_size is None
        )
        return found if evaluated and self._fits(found) else None

    def _fits(self, suggestion: Suggestion) -> bool:
        """Return whether every stage that decides trains within the margin at its own sizes."""
        return all(self.judge.fits(stage, *self._step_of(stage, suggestion)) for stage in self.deciding)

    def _within(self, best: Suggestion, *, capacity_bytes: int) -> Suggestion | None:
        """Find the largest divisor up to that of `best` within a tighter capacity; needs no trace."""
        if best.peak.process_bytes <= capacity_bytes:
            return best
        smaller = (number for number in divisors(self.common) if number < best.batch_size)
        assessed = (self._assess(number, checkpointing=best.checkpointing) for number in smaller)
        return next((one for one in assessed if one.peak.process_bytes <= capacity_bytes), None)

    def _check_sensible(self, batch_size: int, *, largest: int) -> None:
        current = self.stages[0].batch_size.value
        if batch_size >= min(current, largest) or is_sensible(batch_size, largest=largest):
            return
        effective = self.common * self.ranks
        nearest = nearest_batches(self.common, largest=largest)
        choices = (f"{batch * steps * self.ranks} ({batch} × {steps})" for batch, steps in nearest)
        raise BadInput(
            f"the effective batch of {effective} cannot be kept: a batch of up to {largest} fits, and the "
            f"largest that divides it is {batch_size}",
            hint=f"change it with --effective; nearest: {', '.join(choices)}",
        )

    def _assess(
        self, batch_size: int, *, checkpointing: bool, accumulations: Mapping[str, int] | None = None
    ) -> Suggestion:
        """Estimate every stage that decides at this batch."""
        steps = accumulations or {stage.name: self._per_rank(stage) // batch_size for stage in self.stages}
        peaks: dict[str, Peak] = {}
        seconds: list[float | None] = []
        for stage in self.deciding:
            sizes, recipe = self._step(
                stage, batch_size, checkpointing=checkpointing, accumulation=steps[stage.name]
            )
            peaks[stage.name] = self.judge.held(self.judge.peak(stage, sizes, recipe))
            micro_s = self.judge.forecast.of_stage(stage.name).step_s(sizes, recipe=recipe)
            seconds.append(None if micro_s is None else micro_s * steps[stage.name])
        worst = max(peaks, key=lambda name: peaks[name].process_bytes)
        known = [second for second in seconds if second is not None]
        reason = "the largest batch that trains within the margin and divides the effective batch"
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
        """Return the quickest of what was timed and the config can express; None if nothing was."""
        can_switch = all(stage.checkpointing.place is not None for stage in self.stages)
        timed = []
        for switch, best in ((switch, one.suggestion) for switch, one in found.items()):
            if best is None or best.step_s is None or not (can_switch or switch == self.checkpointing):
                continue
            smaller = [number for number in divisors(self.common) if number <= best.batch_size]
            timed += [self._assess(number, checkpointing=switch) for number in smaller]
        timed = [one for one in timed if one.step_s is not None and self._fits(one)]
        if not timed:
            return None
        quickest = min(timed, key=lambda one: (one.step_s or math.inf, -one.batch_size))
        return quickest.named(FASTEST, "the shortest step that was measured", source="measured")

    def _widest(self, checkpointing: bool) -> Iterator[Suggestion]:
        """Find the largest batch that fits at the configured accumulation: it changes the effective batch."""
        steps = {stage.name: stage.accumulation.value for stage in self.stages}
        largest = self._largest(checkpointing, accumulation=max(steps.values())).tight
        if largest is None:
            return
        found = self._assess(largest, checkpointing=checkpointing, accumulations=steps)
        kept = {stage.name: self._per_rank(stage) * self.ranks for stage in self.stages}
        wider = all(found.effective_batches[name] > effective for name, effective in kept.items())
        if wider and self._fits(found):
            effective = max(found.effective_batches.values())
            reason = f"changes the objective, so it is written only with --effective {effective}"
            yield dataclasses.replace(found.named(EFFECTIVE, reason), keeps_effective_batch=False)


def expected_traces(stages: Sequence[StageSettings]) -> list[int]:
    """Count the traces of a group's questions: both sides of checkpointing, other stages, evaluation."""
    left_out = [PEAK] if len(stages) > 1 else []
    return [SEARCH, SEARCH, *left_out, PEAK if stages[0].eval_batch_size is None else SEARCH]


def _name_stages(stages: Sequence[StageSettings]) -> str:
    names = [stage.name for stage in stages]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def find_uncovered(
    stages: Sequence[StageSettings],
    *,
    sizes_of: Callable[[StageSettings], Mapping[str, int]],
    ways_of: Callable[[StageSettings], object],
) -> tuple[StageSettings, ...]:
    """Return the stages that no other covers; of equal ones, the first.

    A stage covers another that is trained in the same way (`ways_of`) at sizes that are nowhere larger.
    """
    kept: list[StageSettings] = []
    for number, stage in enumerate(stages):
        sizes, way = sizes_of(stage), ways_of(stage)
        alike = [other for other in (*kept, *stages[number + 1 :]) if ways_of(other) == way]
        if not any(
            _covers(sizes_of(other), sizes) and (other in kept or sizes_of(other) != sizes) for other in alike
        ):
            kept.append(stage)
    return tuple(kept)


def _covers(sizes: Mapping[str, int], others: Mapping[str, int]) -> bool:
    return all(size >= others[name] for name, size in sizes.items())


def fit_evaluation(
    stages: Sequence[StageSettings],
    *,
    judge: Judge,
    training_batch: int,
    may_raise: bool = False,
    lowered: Mapping[str, Mapping[str, int]] | None = None,
) -> EvaluationFit:
    """Fit the evaluation of stages that share a batch size; `lowered` are sizes that a plan changed."""

    def sizes(stage: StageSettings, batch_size: int) -> dict[str, int]:
        over = (lowered or {}).get(stage.name)
        return job_sizes(stage, judge.forecast, batch_size=batch_size, over=over)

    def peak(batch_size: int) -> Peak:
        found = (
            judge.peak(stage, sizes(stage, batch_size), recipe=evaluation_recipe(stage)) for stage in stages
        )
        return judge.held(max(found, key=lambda one: one.process_bytes))

    if any(stage.eval_batch_size is None for stage in stages):
        return EvaluationFit(
            batch_size=training_batch,
            largest=None,
            suggested=None,
            peak=peak(training_batch),
            reason="it has no size of its own and uses the training batch",
        )
    configured = max(stage.eval_batch for stage in stages)
    largest = least(
        judge.largest(stage, sizes(stage, 1), recipe=evaluation_recipe(stage)) for stage in stages
    ).tight
    suggested, reason = None, "kept: some metrics depend on it (--allow eval_batch_size raises it)"
    if largest is None:
        reason = "not even a batch of 1 fits"
    elif configured > largest:
        suggested, reason = largest, "the configured size does not fit"
    elif may_raise and largest > configured:
        suggested, reason = largest, "raised, as allowed on the command line"
    return EvaluationFit(
        batch_size=configured,
        largest=largest,
        suggested=suggested,
        peak=peak(suggested or configured),
        reason=reason,
    )
