"""Successive halving over questions: most trials are answered by few questions, the best by all.

A bracket of trials meets the questions in one order, the same for all, so that their means are paired.  At
each rung the better half goes on and the questions double, so that every rung costs about the same.  With 4
rungs the first asks an eighth of the questions and each later one costs half as much: 5/16 of asking all.

A trial is running, then complete, pruned or failed, and never changes again.  A failed trial has no mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.ground.errors import BadInput

State = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Halving:
    """`rungs` steps, each asking `factor` times the questions of the last one and keeping 1 / `factor`."""

    rungs: int = 4
    factor: int = 2

    def __post_init__(self) -> None:
        """Refuse a ladder that cannot be climbed."""
        if self.rungs < 1 or self.factor < 2:
            raise BadInput(
                f"rungs={self.rungs} or factor={self.factor} is too small",
                hint="give at least 1 rung (which never prunes) and a factor of 2 or more",
            )

    def ladder(self, num_questions: int) -> tuple[int, ...]:
        """Return the questions answered by the end of each rung; the last is all of them."""
        if num_questions < 1:
            raise BadInput("the search has no questions", hint="give at least one")
        counts = (num_questions // self.factor**step for step in reversed(range(self.rungs)))
        return tuple(sorted({max(1, count) for count in counts}))

    def trials_that_fill(self, num_rows: int, *, num_questions: int) -> int:
        """Return how many trials give every rung at least `num_rows` rows."""
        ladder = (0, *self.ladder(num_questions))
        pairs = enumerate(itertools.pairwise(ladder))
        return max(
            math.ceil(num_rows * float(self.factor) ** rung / (end - start)) for rung, (start, end) in pairs
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RungOver:
    """What the end of a rung decided; `means` are those of every trial that was judged."""

    num_questions: int
    means: dict[int, float]
    kept: tuple[int, ...]
    pruned: tuple[int, ...]
    complete: tuple[int, ...]


class Bracket:
    """The state of some trials on their way up one ladder."""

    def __init__(self, trials: Sequence[int], *, num_questions: int, halving: Halving) -> None:
        if len(set(trials)) != len(trials) or not trials:
            raise BadInput(
                f"the bracket has the trials {list(trials)}", hint="give each once, and at least one"
            )
        self._ladder = halving.ladder(num_questions)
        self._factor = halving.factor
        self._rung = 0
        self._states: dict[int, State] = dict.fromkeys(trials, "running")
        self._values: dict[int, dict[int, float]] = {trial: {} for trial in trials}
        self._entered = len(trials)  # trials that began the rung

    @property
    def is_over(self) -> bool:
        """Whether no trial runs."""
        return "running" not in self._states.values()

    def state(self, trial: int) -> State:
        """Return where a trial stands."""
        return self._states[trial]

    def mean(self, trial: int) -> float | None:
        """Return a trial's mean over the questions it has answered; None for none, and for a failed trial."""
        values = self._values[trial]
        if not values or self._states[trial] == "failed":
            return None
        return math.fsum(values.values()) / len(values)

    def num_answered(self, trial: int) -> int:
        """Count the questions that a trial has answered."""
        return len(self._values[trial])

    def pending(self) -> list[tuple[int, int]]:
        """List the (trial, question) rows that the rung still wants, the trials of a question together."""
        if self.is_over:
            return []
        return [
            (trial, question)
            for question in range(self._ladder[self._rung])
            for trial, state in self._states.items()
            if state == "running" and question not in self._values[trial]
        ]

    def answer(self, trial: int, question: int, value: float) -> None:
        """Take in the value of a row; one that is not a number fails its trial."""
        if self._states[trial] != "running":
            return  # rows of a failed trial may still be on their way
        if not math.isfinite(value):
            self.fail(trial)
        else:
            self._values[trial][question] = value

    def fail(self, trial: int) -> None:
        """End a running trial without a value."""
        if self._states[trial] != "running":
            raise BadInput(f"trial {trial} is {self._states[trial]}", hint="only a running trial can fail")
        self._states[trial] = "failed"

    def advance(self) -> RungOver | None:
        """Judge the rung if every row of it is there."""
        running = [trial for trial, state in self._states.items() if state == "running"]
        if not running or self.pending():
            return None
        num_questions = self._ladder[self._rung]
        means = {trial: mean for trial in running if (mean := self.mean(trial)) is not None}
        ranked = sorted(running, key=lambda trial: (-means[trial], trial))
        if self._rung == len(self._ladder) - 1:
            kept, pruned, complete = [], [], ranked
        else:
            count = max(1, self._entered // self._factor)
            kept, pruned, complete = ranked[:count], ranked[count:], []
        self._states.update(dict.fromkeys(pruned, "pruned"))
        self._states.update(dict.fromkeys(complete, "complete"))
        self._rung, self._entered = self._rung + 1, len(kept)
        return RungOver(
            num_questions=num_questions,
            means=means,
            kept=tuple(kept),
            pruned=tuple(pruned),
            complete=tuple(complete),
        )
