"""Rows of (trial, question) in one batch, whatever their trials.

Answers are scored as branches of their prompts (`branches`).  Texts are generated in slots that run different
trials, refilled from a queue, over prompts computed once.  The tables of vectors have one entry for each
slot: so many rows run at a time, hence at most so many trials.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.engines.steering.blocks import end_tokens
from flatout.engines.steering.trials.branches import BranchScorer
from flatout.engines.steering.trials.steering import Steering, SteeringTables
from flatout.engines.steering.trials.trial_engine import OnText, TextRow, TokenBranch, TrialEngine
from flatout.multiplex.decode.generator import Generator
from flatout.multiplex.decode.requests import Completion, Request
from flatout.multiplex.models.families import read_decoder

if TYPE_CHECKING:
    from torch import nn

    from flatout.multiplex.decode.sampling import Sampling
    from flatout.multiplex.decode.steppers import Mode
    from flatout.multiplex.models.decoder import Decoder


class PackedTrials(TrialEngine):
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
        self._scorer = BranchScorer(self.decoder, batch_tokens=batch_tokens)
        self._generator: Generator | None = None
        self._tables = SteeringTables(set(), num_entries=slots, decoder=self.decoder)

    def weights_changed(self) -> None:
        """Forget every prompt that was computed with other weights."""
        self._scorer.weights_changed()
        if self._generator is not None:
            self._generator.weights_changed()

    def log_probabilities(self, branches: Sequence[TokenBranch]) -> Iterator[tuple[int, list[float]]]:
        """Yield (number of a branch, the log-probabilities of its targets), batch by batch."""
        return self._scorer.log_probabilities(branches)

    def texts(
        self, rows: Sequence[TextRow], *, max_new_tokens: int, on_finished: OnText | None = None
    ) -> list[tuple[int, ...]]:
        """Return the tokens that follow each row's prompt; `on_finished` hears of each as it ends."""
        for row in rows:
            if row.steering is not None:
                row.steering.check_packable(self.decoder)
        generator = self._generator_for({row.steering.layer for row in rows if row.steering is not None})
        queue = self._begin(generator, rows)
        found: dict[int, tuple[int, ...]] = {}

        def finish(number: int, tokens: tuple[int, ...]) -> None:
            found[number] = tokens
            if on_finished is not None:
                on_finished(number, tokens)

        ends = set(generator.state.eos.tolist())  # asked once: the device answers when its work is done
        for one in [one for one in queue if one.is_done(ends, max_new_tokens)]:
            finish(one.number, one.tokens)
        entries = _EntryQueue([one for one in queue if one.number not in found], self._tables, self._slots)

        def finished(completion: Completion) -> None:
            one = entries.leave(completion)
            finish(one.number, (*one.tokens, *completion.tokens))

        generator.generate(
            entries.requests(max_new_tokens), max_new_tokens=max_new_tokens, on_finished=finished
        )
        return [found[number] for number in range(len(rows))]

    def _begin(self, generator: Generator, rows: Sequence[TextRow]) -> list[_StartedRow]:
        """Start the rows with the tokens that no trial changes.

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
            _StartedRow(number, row, first_of[row.prompt, row.key] if id(row) in waits else ())
            for number, row in enumerate(rows)
        ]

    def _generator_for(self, layers: set[int]) -> Generator:
        """Return the generator, made again only where a layer has no table yet."""
        known = self._tables.of_layer.keys()
        if self._generator is None or not layers <= known:
            self._tables = SteeringTables(layers | known, num_entries=self._slots, decoder=self.decoder)
            self._generator = Generator(
                self.decoder,
                slots=self._slots,
                max_tokens=self._max_tokens,
                vectors=self._tables.of_layer,
                sampling=self._sampling,
                eos=end_tokens(self._model) if self._eos is None else self._eos,
                mode=self._mode,
            )
        return self._generator


@dataclass(frozen=True, slots=True)
class _StartedRow:
    """A row and the tokens of its text that are known."""

    number: int
    row: TextRow
    tokens: tuple[int, ...]

    def is_done(self, ends: Set[int], max_new_tokens: int) -> bool:
        """Whether the known tokens are the whole text."""
        return len(self.tokens) >= max_new_tokens or any(token in ends for token in self.tokens)

    def request(self, variant: int | None, *, max_new_tokens: int) -> Request:
        """Ask for what is left to generate; tokens before the first steered one are shared."""
        prompt = (*self.row.prompt, *self.tokens)
        everywhere = self.row.steering is not None and self.row.steering.where == "all"
        return Request(
            prompt=prompt,
            variant=variant,
            key=self.row.key,
            max_new_tokens=max_new_tokens - len(self.tokens),
            shared=0 if everywhere else len(prompt) - 1,
        )


class _EntryQueue:
    """Gives each trial an entry of the tables.

    All entries are written at once before the first row runs.  Where there are more trials than entries, one
    that has no running row gives its entry up.
    """

    def __init__(self, queue: Sequence[_StartedRow], tables: SteeringTables, num_entries: int) -> None:
        # Rows of one prompt run together: its keys and values are found while they are held.
        self._queue = sorted(queue, key=lambda one: one.row.prompt)
        self._tables = tables
        trials = {id(one.row.steering): one.row.steering for one in self._queue}
        seated = [one for one in trials.values() if one is not None][:num_entries]
        self._entry = {id(steering): entry for entry, steering in enumerate(seated)}
        # Trials (by id) with an entry and no running row, the oldest first.
        self._idle = dict.fromkeys(self._entry)
        self._num_running: dict[int, int] = defaultdict(int)
        self._running: dict[int, _StartedRow] = {}  # id of a request -> its row
        tables.write(seated)

    def requests(self, max_new_tokens: int) -> Iterator[Request]:
        """Yield requests as slots become free."""
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
            self._tables.replace(entry, steering)
        self._idle.pop(name, None)
        self._num_running[name] += 1
        return self._entry[name]

    def leave(self, completion: Completion) -> _StartedRow:
        """Return the row that has ended; once no row of its trial runs, another may take its entry."""
        one = self._running.pop(id(completion.request))
        name = id(one.row.steering)
        if one.row.steering is not None:
            self._num_running[name] -= 1
            if not self._num_running[name]:
                self._idle[name] = None
        return one
