"""How a row becomes a number.

`MultipleChoice` reads the probability that the model gives to one of two answers, among the two: no token is
generated, and the value is smooth where an accuracy would jump.  `Judged` generates and lets a function of
yours judge the text.  A row that gives no finite number has failed, and so has its trial.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from flatout.engines.run.models import decode_rows
from flatout.engines.steering.extract.tokens import common_tokens, encode
from flatout.engines.steering.model_blocks import max_positions
from flatout.engines.steering.questions import Question, write_prompts, write_texts
from flatout.engines.steering.report.record import Continuation
from flatout.engines.steering.trials.steering import Steering
from flatout.engines.steering.trials.trial_engine import (
    AnswerPair,
    ChoiceRow,
    Compared,
    TextRow,
    TrialEngine,
)
from flatout.ground.errors import BadInput
from flatout.ground.user_code import calling, defined_at, import_named, place_of

Toward = Literal["positive", "negative"]
DECODED_ROWS = 32  # generated texts that are decoded at a time; a kill may cost as many


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The value of a row, None if it gave no number, and what was generated, if anything was."""

    value: float | None
    text: str | None = None


OnScore = Callable[[int, Score], None]
TrialRow = tuple[Steering | None, Question]


class Scorer(Protocol):
    """A way to judge rows; larger is better."""

    @property
    def refusal(self) -> str | None:
        """Why the last row without a number has none; None if every row had one."""

    def recipe(self) -> Mapping[str, str]:
        """Name what the values depend on, in addition to model and question."""

    def score(self, engine: TrialEngine, rows: Sequence[TrialRow], *, on_score: OnScore) -> None:
        """Call `on_score` with each row's number as soon as it is known."""


class MultipleChoice:
    """p(answer) / (p(answer) + p(other)) of the answer that steering is to move the model `toward`.

    `by` says which tokens of the answers count: all, all but their common ending, or the first different one.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        toward: Toward = "positive",
        by: Compared = "whole",
        system: str | None = None,
    ) -> None:
        if toward not in ("positive", "negative"):
            raise BadInput(f"toward {toward!r} is unknown", hint="use positive or negative")
        self._tokenizer, self._toward, self._by, self._system = tokenizer, toward, by, system
        self._choices: dict[str, AnswerPair] = {}
        self.refusal: str | None = None

    def recipe(self) -> Mapping[str, str]:
        """Name it in one line."""
        by = "" if self._by == "decisive" else f" by {self._by}"  # unnamed in studies that had no other
        return {"score": f"multiple choice toward {self._toward}{by}, system {self._system!r}"}

    def score(self, engine: TrialEngine, rows: Sequence[TrialRow], *, on_score: OnScore) -> None:
        """Score rows by a forward over the answers' tokens."""
        absent = {question.key: question for _, question in rows if question.key not in self._choices}
        self._choices.update(choices_of(list(absent.values()), self._tokenizer, system=self._system))
        packed = [
            ChoiceRow(choice=self._choices[question.key], steering=steering, by=self._by)
            for steering, question in rows
        ]
        sign = 1.0 if self._toward == "positive" else -1.0
        for number, log_odds in engine.choices(packed):
            value = _sigmoid(sign * log_odds) if math.isfinite(log_odds) else None
            if value is None:
                self.refusal = f"the model's log odds of two answers are {log_odds}"
            on_score(number, Score(value=value))


class Judged:
    """What `judge(question, text)` makes of the generated text; it raises ValueError where it has no answer.

    `name` stands for the judge in a study: change it when the judge changes.
    """

    def __init__(
        self,
        tokenizer: Any,
        judge: Callable[[Question, str], float],
        *,
        name: str,
        max_new_tokens: int = 64,
        system: str | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise BadInput(f"max_new_tokens={max_new_tokens} is below 1", hint="give at least 1")
        self._tokenizer, self._judge, self._name = tokenizer, judge, name
        self._max_new_tokens, self._system = max_new_tokens, system
        self.refusal: str | None = None

    def recipe(self) -> Mapping[str, str]:
        """Name it in one line."""
        return {"score": f"{self._name} of {self._max_new_tokens} tokens, system {self._system!r}"}

    def score(self, engine: TrialEngine, rows: Sequence[TrialRow], *, on_score: OnScore) -> None:
        """Generate all rows together; those that have ended are decoded and judged some at a time."""
        texts = [question.prompt for _, question in rows]
        prompts = encode_prompts(texts, self._tokenizer, system=self._system)
        packed = [
            TextRow(prompt=prompt, steering=steering)
            for prompt, (steering, _) in zip(prompts, rows, strict=True)
        ]

        ended: dict[int, tuple[int, ...]] = {}

        def judge_ended() -> None:
            texts = decode_rows(self._tokenizer, list(ended.values()), extra="steering")
            some = list(zip(ended, texts, strict=True))
            ended.clear()
            for number, text in some:
                on_score(number, self._judged(rows[number][1], text))

        def finished(number: int, tokens: tuple[int, ...]) -> None:
            ended[number] = tokens
            if len(ended) >= DECODED_ROWS:
                judge_ended()

        try:
            engine.texts(packed, max_new_tokens=self._max_new_tokens, on_finished=finished)
        except KeyboardInterrupt:
            judge_ended()  # what has been generated is kept
            raise
        judge_ended()

    def _judged(self, question: Question, text: str) -> Score:
        title = f"the judge {self._name}"
        with calling(title):
            try:
                value = self._judge(question, text)
            except ValueError as error:
                self.refusal = f"{title} raised ValueError: {error}, at {place_of(error)}"
                return Score(value=None, text=text)
        place = f"at {defined_at(self._judge)}"
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise BadInput(f"{title} returned {str(value)[:60]!r}, not a number", hint=place) from None
        if not math.isfinite(number):
            self.refusal = f"{title} returned {number}, {place}"
        return Score(value=number if math.isfinite(number) else None, text=text)


def find_judge(spec: str) -> tuple[Callable[[Question, str], float], str]:
    """Import `package.module:function`, and name it with a hash of its source: a study is bound to both."""
    form = "write package.module:function; it is given a question and a text, and returns a number"
    judge = import_named(spec, what="judge", form=form)
    if not callable(judge):
        raise BadInput(f"the judge {spec!r} is not a function", hint=form)
    try:
        inspect.signature(judge).bind(None, "")
    except TypeError:
        raise BadInput(f"the judge {spec!r} takes {inspect.signature(judge)}", hint=form) from None
    except ValueError:  # a function in C does not say what it takes
        pass
    whole = inspect.unwrap(judge)
    try:  # of an object that is called, its class
        source = inspect.getsource(whole if inspect.isroutine(whole) else type(whole))
    except (OSError, TypeError):
        return judge, spec
    return judge, f"{spec} {hashlib.sha256(source.encode()).hexdigest()[:8]}"


def encode_prompts(
    texts: Sequence[str], tokenizer: Any, *, system: str | None = None
) -> list[tuple[int, ...]]:
    """Encode prompts, in the tokenizer's chat template where it has one."""
    prompts = write_texts(texts, tokenizer, system=system)
    return encode(prompts, tokenizer=tokenizer).tokens() if prompts else []


def continue_prompts(
    engine: TrialEngine, tokenizer: Any, texts: Sequence[str], steering: Steering, *, max_new_tokens: int
) -> tuple[Continuation, ...]:
    """Continue prompts with and without a steering, in one generation."""
    prompts = encode_prompts(texts, tokenizer)
    rows = [TextRow(prompt=prompt, steering=one) for one in (None, steering) for prompt in prompts]
    found = decode_rows(tokenizer, engine.texts(rows, max_new_tokens=max_new_tokens), extra="steering")
    return tuple(
        Continuation(prompt=text, unsteered=unsteered, steered=steered)
        for text, unsteered, steered in zip(texts, found[: len(texts)], found[len(texts) :], strict=True)
    )


def choices_of(
    questions: Sequence[Question], tokenizer: Any, *, system: str | None = None
) -> dict[str, AnswerPair]:
    """Encode questions and answers, by key.

    Prompt and answer are tokenised together, as the model would have read them.  Where the tokenizer joins
    the end of the prompt with the answer, the prompt ends before the joint.
    """
    if not questions:
        return {}
    pairs = write_prompts(questions, tokenizer=tokenizer, system=system)
    texts = [
        text
        for pair in pairs
        for text in (pair.prompt, pair.prompt + pair.positive, pair.prompt + pair.negative)
    ]
    sequences = encode(texts, tokenizer=tokenizer).tokens()
    found = {}
    for place, pair in enumerate(pairs):
        prompt, positive, negative = sequences[3 * place : 3 * place + 3]
        end = min(common_tokens(prompt, positive), common_tokens(prompt, negative))
        try:
            found[pair.key] = AnswerPair(
                prompt=positive[:end], positive=positive[end:], negative=negative[end:]
            )
        except BadInput as error:
            raise BadInput(f"the question {pair.prompt[-60:]!r}: {error.message}", hint=error.hint) from error
    return found


def check_choices(questions: Sequence[Question], model: Any, tokenizer: Any) -> None:
    """Raise BadInput for a question that cannot be asked: the test's would show after the whole search."""
    most = max_positions(model)
    texts = {question.key: question.prompt for question in questions}
    for key, choice in choices_of(questions, tokenizer).items():
        num_tokens = len(choice.prompt) + max(len(choice.positive), len(choice.negative))
        if most is not None and num_tokens > most:
            raise BadInput(
                f"the question {texts[key][:60]!r} has {num_tokens} tokens with its answer; the model has"
                f" {most} positions",
                hint="shorten it or leave it out",
            )


def check_room(texts: Sequence[str], model: Any, tokenizer: Any, *, max_new_tokens: int) -> None:
    """Refuse a text that passes the model's positions: transformers only warns, and what follows is noise."""
    most = max_positions(model)
    longest = max(map(len, encode_prompts(texts, tokenizer)))
    if most is not None and longest + max_new_tokens > most:
        raise BadInput(
            f"a prompt of {longest} tokens and {max_new_tokens} more exceed the model's {most}",
            hint="use fewer --max-new-tokens or shorter prompts",
        )


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
