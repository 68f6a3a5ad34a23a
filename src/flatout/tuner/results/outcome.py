"""The result of a tuning: every treatment with its outcome, and the gain of everything kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from flatout.tuner.results.prescription import Prescription
from flatout.tuner.treatment import Dose
from flatout.tuner.verdict import Gain, JobGain

NO_TIME = "no time was left for it"
NO_TIME_TO_VERIFY = "no time was left to verify its numbers"

Answer = Literal["kept", "no gain", "wrong numbers", "failed", "undecided", "not tried", "dropped again"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A treatment and its outcome."""

    name: str
    value: bool | int | str
    safety: str
    summary: str
    answer: Answer
    reason: str
    gain: Gain | None = None  # of the step
    job: JobGain | None = None  # including its cost at the start
    in_one_run: bool = False  # switched in blocks of one run, not in pairs of runs

    def __str__(self) -> str:
        return str(Dose(name=self.name, value=self.value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What was tried on a job, and what was kept."""

    tried: tuple[Tried, ...]
    noise: Gain  # the job against itself
    reproducible: bool
    total: Gain | None  # everything kept against nothing; None if nothing was kept
    prescription: Prescription
    num_trials: int
    step_s: float  # of the diagnosed job
    diff: str = ""  # of the kept patches
    smallest_gain: float | None = None  # the smallest that pairs of runs could show here
    noise_in_run: Gain | None = None  # blocks of one run against themselves
    envelope: float | None = None  # of the loss: how far runs of the job itself differ, at most
    job: JobGain | None = None  # of everything kept, including its cost at the start

    def say_repeats(self) -> str:
        """Say whether the job repeats, and how far rounding moves its losses if it does."""
        moved = f"by up to {self.envelope or 0:.1e} of the loss"
        if self.reproducible:
            return f"It repeats bit for bit; weights that differ in their last bit move its losses {moved}."
        return f"It does not repeat bit for bit; its losses vary on their own {moved}."

    def why_nothing(self) -> str:
        """Say why nothing was kept."""
        untried = sum(each.reason in (NO_TIME, NO_TIME_TO_VERIFY) for each in self.tried)
        if untried:
            return (
                f"Nothing is proven: there was no time for {untried} of {len(self.tried)} treatments."
                " Give it more --minutes, or try one of them with --only."
            )
        num: Counter[str] = Counter(each.answer for each in self.tried)
        open_ones = [
            f"{num[answer]} {words}"
            for answer, words in (
                ("undecided", "undecided"),
                ("wrong numbers", "with other numbers"),
                ("failed", "failed"),
            )
            if num[answer]
        ]
        if open_ones:
            return (
                f"Nothing is proven. Of {len(self.tried)} treatments: {', '.join(open_ones)}; see why above."
                + (" A calmer machine shows smaller gains." if num["undecided"] else "")
            )
        if self.tried and num["not tried"] == len(self.tried):
            return "Nothing was tried; see why above."
        return "No treatment that was tried gains: the script is as fast as these treatments can make it."
