"""Rows of (trial, question), and what an engine answers about them.

Two ways to judge a trial.  A question with two answers needs no generation: the log-probabilities of both are
read from one forward over the answers' tokens (`choices`).  Everything else is generated and judged by its
text (`texts`).  Both engines, `PackedTrials` and `HookedTrials`, give the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flatout.engines.steering.trials.steering import Steering
from flatout.ground.errors import BadInput

OnText = Callable[[int, tuple[int, ...]], None]
Compared = Literal["whole", "decisive", "first-token"]  # which tokens of two answers are compared


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPair:
    """A prompt and two answers to it, in tokens."""

    prompt: tuple[int, ...]
    positive: tuple[int, ...]
    negative: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what has no answers to compare."""
        if not self.prompt or not self.positive or not self.negative:
            raise BadInput("a choice has an empty prompt or answer", hint="each needs at least one token")
        if self.positive == self.negative:
            raise BadInput(
                "both answers of a choice are the same tokens",
                hint="give answers that the tokenizer distinguishes",
            )

    def compared(self, by: Compared) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return (what both answers begin with, what then is positive, what then is negative).

        "decisive" leaves out the tokens that both end with, "first-token" all but the first that differs.
        """
        shorter = min(len(self.positive), len(self.negative))
        head = next((i for i in range(shorter) if self.positive[i] != self.negative[i]), shorter)
        positive, negative = self.positive[head:], self.negative[head:]
        tail = 0
        if by == "decisive":
            while tail < min(len(positive), len(negative)) - 1 and positive[-1 - tail] == negative[-1 - tail]:
                tail += 1
        most = 1 if by == "first-token" else None
        return (
            self.positive[:head],
            positive[: len(positive) - tail][:most],
            negative[: len(negative) - tail][:most],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChoiceRow:
    """One question under one trial; None is the unsteered model."""

    choice: AnswerPair
    steering: Steering | None
    by: Compared = "whole"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TextRow:
    """One prompt continued under one trial; None is the unsteered model."""

    prompt: tuple[int, ...]
    steering: Steering | None
    key: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenBranch:
    """Tokens behind a trunk that others may share, steered from the `first_steered`-th on.

    `targets` are (index of a token here, token that may follow it): their log-probabilities are wanted.
    """

    trunk: tuple[int, ...]
    tokens: tuple[int, ...]
    targets: tuple[tuple[int, int], ...]
    steering: Steering | None = None
    first_steered: int = 0


class TrialEngine(ABC):
    """Answers rows of any trials of one model."""

    @abstractmethod
    def log_probabilities(self, branches: Sequence[TokenBranch]) -> Iterator[tuple[int, list[float]]]:
        """Yield (number of a branch, the log-probabilities of its targets), as batches finish."""

    @abstractmethod
    def texts(
        self, rows: Sequence[TextRow], *, max_new_tokens: int, on_finished: OnText | None = None
    ) -> list[tuple[int, ...]]:
        """Return the tokens that follow each row's prompt; `on_finished` hears of each as it ends."""

    def choices(self, rows: Sequence[ChoiceRow]) -> Iterator[tuple[int, float]]:
        """Yield (number of a row, log-odds of its positive answer over its negative one)."""
        branches: list[TokenBranch] = []
        owners: list[tuple[int, int, int]] = []  # (row, which of its branches, how many it has)
        for number, row in enumerate(rows):
            made = _branches_of(row)
            owners += [(number, part, len(made)) for part in range(len(made))]
            branches += made
        held: dict[int, dict[int, list[float]]] = defaultdict(dict)
        for index, values in self.log_probabilities(branches):
            number, part, num_parts = owners[index]
            held[number][part] = values
            if len(held[number]) == num_parts:
                yield number, _log_odds(held.pop(number))

    def log_likelihoods(
        self, texts: Sequence[tuple[int, ...]], steering: Steering | None
    ) -> list[tuple[float, int]]:
        """Return (sum of log-probabilities, tokens counted) of each text; its first token is the prompt."""
        branches = [
            TokenBranch(
                trunk=(),
                tokens=text[:-1],
                targets=tuple(enumerate(text[1:])),
                steering=steering,
                first_steered=int(steering is not None and steering.where == "generated"),
            )
            for text in texts
        ]
        found = dict(self.log_probabilities(branches))
        return [(sum(found[number]), len(found[number])) for number in range(len(texts))]


def _branches_of(row: ChoiceRow) -> list[TokenBranch]:
    """Make one branch where one token decides, else one for each answer."""
    prompt, steering = row.choice.prompt, row.steering
    head, positive, negative = row.choice.compared(row.by)
    own = prompt if steering is not None and steering.where == "all" else prompt[-1:]
    plain = TokenBranch(
        trunk=prompt[: len(prompt) - len(own)],
        tokens=own,
        targets=(),
        steering=steering,
        first_steered=len(own) if steering is not None and steering.where == "generated" else 0,
    )
    last = len(own) + len(head) - 1  # the token that the first different one follows
    if len(positive) == len(negative) == 1:
        return [replace(plain, tokens=own + head, targets=((last, positive[0]), (last, negative[0])))]
    return [
        replace(
            plain,
            tokens=own + head + answer[:-1],
            targets=tuple((last + step, token) for step, token in enumerate(answer)),
        )
        for answer in (positive, negative)
    ]


def _log_odds(parts: Mapping[int, Sequence[float]]) -> float:
    """Return log p(positive) - log p(negative) of one row, from its one branch or its two."""
    if len(parts) == 1:
        positive, negative = parts[0]
        return positive - negative
    return sum(parts[0]) - sum(parts[1])
