"""What a report shows of a study, apart from how it is drawn.

A search writes it as one JSON file beside its study, so that a report can be made again without the model,
without Optuna and on another machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flatout.engines.steering.settings import Mode, Where
from flatout.ground.documents import DocumentKind, read_document, write_document

STUDY = DocumentKind(
    format="flatout-steering", version=1, what="a study of flatout steer", hint="give the folder of a search"
)

FILE = "result.json"
FEWEST = 10  # values that an interval is made of

State = Literal["complete", "pruned", "failed", "running"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate and the interval that holds it with 95 % confidence; None of too few values."""

    value: float
    low: float | None
    high: float | None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Both ends, where they are known."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def show(self, *, signed: bool = True) -> str:
        """Show it as text; a difference has a sign, a score has none."""
        sign = "+" if signed else ""
        if self.bounds is None:
            return f"{self.value:{sign}.3f} (too few for an interval)"
        low, high = self.bounds
        return f"{self.value:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One configuration; `number` is Optuna's."""

    number: int
    layer: int
    method: str
    strength: float
    where: Where
    mode: Mode = "add"
    span: int = 1  # layers that are steered at once, from `layer` on

    def describe(self) -> str:
        """Describe the configuration."""
        mode = "" if self.mode == "add" else f"{self.mode}, "
        after = "" if self.span == 1 else f" and the {self.span - 1} after it"
        what = f"{self.method}, {mode}strength {self.strength:+.3g}"
        return f"layer {self.layer}{after}, {what}, {self.where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord(Trial):
    """A trial and its mean score over the questions it was asked; None where it has none."""

    state: State
    score: float | None = None
    num_questions: int | None = None
    perplexity_ratio: float | None = None  # of neutral text, steered over unsteered; known for a few trials


@dataclass(frozen=True, kw_only=True, slots=True)
class Retest:
    """Winner and baseline on questions that the search never saw; the difference is paired."""

    num_questions: int
    baseline: Interval
    steered: Interval
    difference: Interval

    @property
    def is_certain(self) -> bool:
        bounds = self.difference.bounds
        return bounds is not None and (bounds[0] > 0 or bounds[1] < 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """One prompt, continued with and without the vector."""

    prompt: str
    unsteered: str
    steered: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRecord:
    """A study and its results."""

    name: str
    model: str
    num_layers: int
    score_name: str
    trials: tuple[TrialRecord, ...]
    best: int | None = None  # number of the winner
    baseline_score: float | None = None  # of the unsteered model on the search's questions
    retest: Retest | None = None
    perplexity_ratio: Interval | None = None  # the winner's
    examples: tuple[Continuation, ...] = ()
    search_s: float | None = None
    device: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def winner(self) -> TrialRecord | None:
        return next((trial for trial in self.trials if trial.number == self.best), None)

    def count(self, state: State) -> int:
        return sum(trial.state == state for trial in self.trials)

    def headline(self) -> str:
        """Say what the study found, with its uncertainty."""
        retest = self.retest
        if self.winner is None:
            return "No trial has been scored yet."
        where = self.winner.describe()
        where = where[:1].upper() + where[1:]
        if retest is None:
            return f"{where} scored best; it has not been tested on fresh questions."
        if retest.difference.bounds is None:
            return (
                f"{where} scored best in the search; {retest.num_questions} fresh questions are too few to"
                f" tell whether it works on others: {FEWEST} are the fewest."
            )
        if not retest.is_certain:
            return (
                f"{where} scored best in the search, but on {retest.num_questions} fresh questions its"
                " difference from the unsteered model is within the noise."
            )
        moved = "raises" if retest.difference.value > 0 else "lowers"
        return (
            f"{where} {moved} the {self.score_name} by {abs(retest.difference.value):.3g} on"
            f" {retest.num_questions} fresh questions."
        )


def save_record(record: StudyRecord, path: Path) -> None:
    """Write the record, whole or not at all."""
    write_document(path, record, STUDY)


def load_record(path: Path) -> StudyRecord:
    """Read what `save_record` wrote, given the file or the run folder."""
    return read_document(path / FILE if path.is_dir() else path, StudyRecord, STUDY)
