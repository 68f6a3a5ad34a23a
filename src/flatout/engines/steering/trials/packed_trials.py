"""Rows of (trial, question) in one batch, whatever their trials.

Two ways to judge a trial.  A question with two answers needs no generation: the log-probabilities of both are
read from one forward over the answers' tokens (`choices`).  Everything else is generated and judged by its
text (`texts`): slots that run different trials, refilled from a queue, over prompts computed once.

In a generation the tables of vectors have one entry for each slot: so many rows run at a time, hence at most
so many trials.  Entries are written in place, so captured steps stay valid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from flatout.engines.steering.trials.branches import Branch, Grove, check_steering
from flatout.engines.steering.trials.steered_model import Steering
from flatout.errors import BadInput
from flatout.multiplex.decode.generator import Generator
from flatout.multiplex.decode.requests import Completion, Request
from flatout.multiplex.models.families import read_decoder

if TYPE_CHECKING:
    from torch import nn

    from flatout.multiplex.decode.sampling import Sampling
    from flatout.multiplex.decode.steppers import Mode
    from flatout.multiplex.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A prompt and two answers to it, in tokens."""

    prompt: tuple[int, ...]
    positive: tuple[int, ...]
    negative: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what has no answer to compare."""
        if not self.prompt or not self.positive or not self.negative:
            raise BadInput("a choice with an empty prompt or answer", hint="each needs at least one token")
        if self.positive == self.negative:
            raise BadInput(
                "both answers of a choice are the same tokens",
                hint="give answers that the tokenizer tells apart",
            )

    def decisive(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """(what both answers begin with, what then is positive, what then is negative).

        What both end with in the same words is left out: by then the choice has been made.
        """
        shorter = min(len(self.positive), len(self.negative))
        head = next((i for i in range(shorter) if self.positive[i] != self.negative[i]), shorter)
        positive, negative = self.positive[head:], self.negative[head:]
        tail = 0
        while tail < min(len(positive), len(negative)) - 1 and positive[-1 - tail] == negative[-1 - tail]:
            tail += 1
        return self.positive[:head], positive[: len(positive) - tail], negative[: len(negative) - tail]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChoiceRow:
    """One question under one trial; None is the unsteered model."""

    choice: Choice
    steering: Steering | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TextRow:
    """One prompt continued under one trial; None is the unsteered model."""

    prompt: tuple[int, ...]
    steering: Steering | None
    key: int = 0


class PackedTrials:
    """Many trials of one model at a time.

    `batch_tokens` bounds a forward over answers, `slots` and `max_tokens` (prompt and text) a generation.
    """

    def __init__(
        self,
        model: nn.Module | Decoder,
        *,
        slots: int = 64,
        max_tokens: int = 1024,
        batch_tokens: int = 8192,
        sampling: Sampling | None = None,
        eos: Sequence[int] | None = None,
        mode: Mode = "auto",
    ) -> None:
        self._model = model
        self.decoder = read_decoder(model)
        self._slots, self._sampling, self._eos, self._mode = slots, sampling, eos, mode
        self._max_tokens = min(max_tokens, self.decoder.max_positions)
        self._grove = Grove(self.decoder, batch_tokens=batch_tokens)
        self._generator: Generator | None = None
        self._tables = _Tables(set(), num_entries=slots, decoder=self.decoder)

    def weights_changed(self) -> None:
        """Forget every prompt that was computed with other weights."""
        self._grove.weights_changed()
        if self._generator is not None:
            self._generator.weights_changed()

    def choices(self, rows: Sequence[ChoiceRow]) -> Iterator[tuple[int, float]]:
        """(number of a row, log-odds of its positive answer over its negative one), as batches finish."""
        branches: list[Branch] = []
        owners: list[tuple[int, int, int]] = []  # (row, which of its branches, how many it has)
        for number, row in enumerate(rows):
            made = _branches_of(row)
            owners += [(number, part, len(made)) for part in range(len(made))]
            branches += made
        held: dict[int, dict[int, list[float]]] = defaultdict(dict)
        for index, values in self._grove.log_probabilities(branches):
            number, part, num_parts = owners[index]
            held[number][part] = values
            if len(held[number]) == num_parts:
                yield number, _log_odds(held.pop(number))

    def log_likelihoods(
        self, texts: Sequence[tuple[int, ...]], steering: Steering | None
    ) -> list[tuple[float, int]]:
        """(sum of log-probabilities, tokens counted) of each text; its first token is the prompt."""
        branches = [
            Branch(
                trunk=(),
                tokens=text[:-1],
                targets=tuple(enumerate(text[1:])),
                steering=steering,
                first_steered=int(steering is not None and steering.where == "generated"),
            )
            for text in texts
        ]
        found = dict(self._grove.log_probabilities(branches))
        return [(sum(found[number]), len(found[number])) for number in range(len(texts))]

    def texts(
        self,
        rows: Sequence[TextRow],
        *,
        max_new_tokens: int,
        on_finished: Callable[[int, tuple[int, ...]], None] | None = None,
    ) -> list[tuple[int, ...]]:
        """The tokens that follow each row's prompt; `on_finished` hears of each as it ends."""
        for row in rows:
            check_steering(row.steering, self.decoder)
        generator = self._generator_for({row.steering.layer for row in rows if row.steering is not None})
        queue = self._begun(generator, rows, max_new_tokens=max_new_tokens)
        found: dict[int, tuple[int, ...]] = {}

        def finish(number: int, tokens: tuple[int, ...]) -> None:
            found[number] = tokens
            if on_finished is not None:
                on_finished(number, tokens)

        ends = set(generator.state.eos.tolist())  # asked once: the device answers when its work is done
        for one in [one for one in queue if one.is_done(ends, max_new_tokens)]:
            finish(one.number, one.tokens)
        seating = _Seating([one for one in queue if one.number not in found], self._tables, self._slots)

        def finished(completion: Completion) -> None:
            one = seating.leave(completion)
            finish(one.number, (*one.tokens, *completion.tokens))

        generator.generate(
            seating.requests(max_new_tokens), max_new_tokens=max_new_tokens, on_finished=finished
        )
        return [found[number] for number in range(len(rows))]

    def _begun(self, generator: Generator, rows: Sequence[TextRow], *, max_new_tokens: int) -> list[_Begun]:
        """The rows with the tokens that no trial changes.

        Where generated tokens alone are steered, the first of them comes from the plain prompt: it is
        generated once for each prompt, and steering starts at it.
        """
        later = [row for row in rows if row.steering is not None and row.steering.where == "generated"]
        asked = list(dict.fromkeys((row.prompt, row.key) for row in later))
        plain = [Request(prompt=prompt, key=key, shared=len(prompt) - 1) for prompt, key in asked]
        firsts = generator.generate(plain, max_new_tokens=1) if plain else []
        first_of = {place: one.tokens for place, one in zip(asked, firsts, strict=True)}
        waits = {id(row) for row in later}
        return [
            _Begun(number, row, first_of[row.prompt, row.key] if id(row) in waits else ())
            for number, row in enumerate(rows)
        ]

    def _generator_for(self, layers: set[int]) -> Generator:
        """The generator, made again only where a layer has no table yet."""
        known = self._tables.of_layer.keys()
        if self._generator is None or not layers <= known:
            self._tables = _Tables(layers | known, num_entries=self._slots, decoder=self.decoder)
            self._generator = Generator(
                self.decoder,
                slots=self._slots,
                max_tokens=self._max_tokens,
                vectors=self._tables.of_layer,
                sampling=self._sampling,
                eos=_end_tokens(self._model) if self._eos is None else self._eos,
                mode=self._mode,
            )
        return self._generator


@dataclass(frozen=True, slots=True)
class _Begun:
    """A row and the tokens of its text that are known."""

    number: int
    row: TextRow
    tokens: tuple[int, ...]

    def is_done(self, ends: Set[int], max_new_tokens: int) -> bool:
        """Whether the known tokens are the whole text."""
        return len(self.tokens) >= max_new_tokens or any(token in ends for token in self.tokens)

    def request(self, variant: int | None, *, max_new_tokens: int) -> Request:
        """What is left to generate; tokens before the first steered one are shared."""
        prompt = (*self.row.prompt, *self.tokens)
        everywhere = self.row.steering is not None and self.row.steering.where == "all"
        return Request(
            prompt=prompt,
            variant=variant,
            key=self.row.key,
            max_new_tokens=max_new_tokens - len(self.tokens),
            shared=0 if everywhere else len(prompt) - 1,
        )


class _Tables:
    """What each entry adds at each layer, at fixed addresses: `of_layer` are views [entries, D]."""

    def __init__(self, layers: Set[int], *, num_entries: int, decoder: Decoder) -> None:
        self._place = {layer: place for place, layer in enumerate(sorted(layers))}
        shape = (len(layers), num_entries, decoder.width)
        self._storage = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self.of_layer = dict(zip(self._place, self._storage, strict=True))

    def write(self, steerings: Sequence[Steering]) -> None:
        """Entry i adds what steering i adds, and the entries behind them nothing.

        By one copy to the device: hundreds of them take longer than a step of a small model.
        """
        self._storage.zero_()
        if not steerings:
            return
        directions = torch.stack([one.direction.to("cpu", torch.float32) for one in steerings])
        added = directions * torch.tensor([one.amount for one in steerings], dtype=torch.float32)[:, None]
        places = torch.tensor([[self._place[one.layer] for one in steerings], range(len(steerings))])
        layer, entry = places.to(self._storage.device)
        self._storage[layer, entry] = added.to(self._storage)

    def replace(self, entry: int, *, before: Steering, after: Steering) -> None:
        """Another steering takes an entry over."""
        self.of_layer[before.layer][entry] = 0
        table = self.of_layer[after.layer]
        table[entry] = after.added().to(table)


class _Seating:
    """Which entry of the tables each trial owns.

    All entries are written at once before the first row runs.  Where there are more trials than entries, one
    that has no running row gives its entry up, and only the layers that change are written.
    """

    def __init__(self, queue: Sequence[_Begun], tables: _Tables, num_entries: int) -> None:
        # Rows of one prompt run together: its keys and values are found while they are held.
        self._queue = sorted(queue, key=lambda one: one.row.prompt)
        self._tables = tables
        trials = {id(one.row.steering): one.row.steering for one in self._queue}
        seated = [one for one in trials.values() if one is not None][:num_entries]
        self._held: list[Steering] = seated  # by entry
        self._entry = {id(steering): entry for entry, steering in enumerate(seated)}
        self._idle = dict.fromkeys(
            self._entry
        )  # ids of trials with an entry and no running row, oldest first
        self._num_running: dict[int, int] = defaultdict(int)
        self._running: dict[int, _Begun] = {}  # id of a request -> its row
        tables.write(seated)

    def requests(self, max_new_tokens: int) -> Iterator[Request]:
        """Drawn from as slots become free."""
        for one in self._queue:
            request = one.request(self._enter(one.row.steering), max_new_tokens=max_new_tokens)
            self._running[id(request)] = one
            yield request

    def _enter(self, steering: Steering | None) -> int | None:
        if steering is None:
            return None
        name = id(steering)
        if name not in self._entry:
            left = next(iter(self._idle))  # fewer trials run than there are slots, and so entries
            entry = self._entry[name] = self._entry.pop(left)
            del self._idle[left]
            self._tables.replace(entry, before=self._held[entry], after=steering)
            self._held[entry] = steering
        self._idle.pop(name, None)
        self._num_running[name] += 1
        return self._entry[name]

    def leave(self, completion: Completion) -> _Begun:
        """The row that has ended; once no row of its trial runs, another may take its entry."""
        one = self._running.pop(id(completion.request))
        name = id(one.row.steering)
        if one.row.steering is not None:
            self._num_running[name] -= 1
            if not self._num_running[name]:
                self._idle[name] = None
        return one


def _end_tokens(model: nn.Module | Decoder) -> tuple[int, ...]:
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def _branches_of(row: ChoiceRow) -> list[Branch]:
    """One branch where one token decides, else one for each answer."""
    prompt, steering = row.choice.prompt, row.steering
    head, positive, negative = row.choice.decisive()
    everywhere = steering is not None and steering.where == "all"
    own = prompt if everywhere else prompt[-1:]
    plain = Branch(
        trunk=prompt[: len(prompt) - len(own)],
        tokens=own,
        targets=(),
        steering=steering,
        first_steered=len(own) if steering is not None and steering.where == "generated" else 0,
    )
    last = len(own) + len(head) - 1  # the token that the decisive one follows
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
    """log p(positive) - log p(negative) of one row, from its one branch or its two."""
    if len(parts) == 1:
        positive, negative = parts[0]
        return positive - negative
    return sum(parts[0]) - sum(parts[1])
