"""What an extraction has to compute, cut into batches that fit.

A piece of work is one sequence, or a fork: two sequences that begin alike.  A fork computes the common part
once, at the price of a second pass for the endings.  That pass is short, but a pass over a few tokens takes
as long as one over a few hundred: it reads every weight either way.  So a batch has forks only if they save
more than that pass costs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.engines.steering.extract.layer_reader import Fork, LayerReader, Range, Tokens
from flatout.engines.steering.extract.tokens import common_tokens
from flatout.ground.decisions import Decision
from flatout.ground.errors import BatchDoesNotFit

# Tokens at which a GPU begins to be limited by arithmetic and not by reading the weights: its FLOP per byte,
# 165 for an RTX 4090 and 206 for an H200 in bf16.  A CPU is there at once (22 measured on one core).
READING_TOKENS = 256
CPU_READING_TOKENS = 32
# What two passes for a pair cost the host, as arithmetic that a GPU does meanwhile: about 0.1 ms on an H200,
# where pairs of a 135M model came slower for it (0.64 of both texts apart) and of an 8B one faster (1.06).
FORK_FLOP = 3e10
STARTING_PARTS = 2  # computed as they come: by then the texts that follow are tokenised faster than computed


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One sequence, or two as a fork, by their numbers."""

    numbers: tuple[int, ...]
    tokens: Sequence[Tokens]
    ranges: Sequence[Range]
    prefix: int = 0  # tokens that two sequences share and that are computed once

    @property
    def cost(self) -> int:
        """Columns that the work fills in a batch."""
        return self.prefix + len(self.tokens) * (max(map(len, self.tokens)) - self.prefix)

    @property
    def saved(self) -> int:
        """Tokens that are not computed because two sequences share them."""
        return self.prefix * (len(self.tokens) - 1)

    def fork(self) -> Fork:
        first, second = self.tokens
        return Fork(
            prefix=first[: self.prefix],
            endings=(first[self.prefix :], second[self.prefix :]),
            ranges=(self.ranges[0], self.ranges[1]),
        )

    def apart(self) -> list[Work]:
        """Take a fork apart into single sequences."""
        return [
            Work(numbers=(number,), tokens=(tokens,), ranges=(one,))
            for number, tokens, one in zip(self.numbers, self.tokens, self.ranges, strict=True)
        ]


def plan_work(
    missing: Sequence[int],
    *,
    sequences: Sequence[Tokens],
    ranges: Sequence[Range],
    pairs: Sequence[tuple[int, int]],
) -> list[Work]:
    """Make forks of missing pairs that begin alike, and single work of every other missing sequence."""
    left = dict.fromkeys(missing)
    work = []
    for pair in pairs:
        if pair[0] == pair[1] or pair[0] not in left or pair[1] not in left:
            continue
        tokens = [sequences[number] for number in pair]
        wanted = [ranges[number] for number in pair]
        # Whatever is wanted must lie behind the common part, where each sequence is by itself.
        prefix = min(common_tokens(*tokens), wanted[0][0], wanted[1][0])
        if prefix > 0:
            work.append(Work(numbers=pair, tokens=tokens, ranges=wanted, prefix=prefix))
            del left[pair[0]], left[pair[1]]
    work += [Work(numbers=(one,), tokens=(sequences[one],), ranges=(ranges[one],)) for one in left]
    return work


def forks_pay(
    work: Sequence[Work],
    *,
    batch_tokens: int,
    device: torch.device,
    num_weights: int,
    able: Callable[[], bool],
) -> Decision[bool]:
    """Decide whether to compute once what the two texts of a pair share."""
    forks = [one for one in work if one.prefix]
    saved = sum(one.saved for one in forks)
    if not work:
        return Decision(value=False, reason="no text is left to compute", source="computed")
    if not saved:
        return Decision(value=False, reason="no two texts of a pair share a beginning", source="computed")
    if not able():
        reason = "the model does not continue from a plain cache of keys and values"
        return Decision(value=False, reason=reason, source="computed")
    cost = sum(one.cost for one in forks)
    batches = -(-cost // batch_tokens)
    spent = batches * CPU_READING_TOKENS
    if device.type != "cpu":
        spent = batches * READING_TOKENS + round(len(forks) * FORK_FLOP / (2 * num_weights))
    reason = (
        f"{saved} of {saved + cost} tokens are shared; {batches} more passes cost as much as {spent} tokens"
    )
    return Decision(value=saved > spent, reason=reason, source="computed")


class BatchRunner:
    """Runs work in batches of at most `batch_tokens` tokens and `max_rows` texts.

    `on_values(numbers, values)` gets each batch.  A batch that runs out of memory halves the budget.
    """

    def __init__(
        self,
        reader: LayerReader,
        *,
        batch_tokens: int,
        on_values: Callable[[Sequence[int], Tensor], None],
        max_rows: int | None = None,
    ) -> None:
        self._reader, self._on_values = reader, on_values
        self._batch_tokens, self._max_rows = batch_tokens, max_rows

    def run(self, parts: Iterable[Sequence[Work]]) -> None:
        """Compute all work, of each part the shortest first; what fills no batch waits for the next part.

        The first parts wait for nothing, so that the device begins.
        """
        waiting: list[Work] = []
        for number, part in enumerate(parts):
            ready, waiting = [*waiting, *part], []
            if number >= STARTING_PARTS:
                ready, waiting = self._split_full(ready)
            self._run_all(ready)
        self._run_all(waiting)

    def _run_all(self, work: Sequence[Work]) -> None:
        forks, others = _by_kind(work)
        while forks:
            split = self._run_until_too_large(forks)
            forks, apart = _by_kind(split)
            others += apart
        while others:
            others = self._run_until_too_large(others)

    def _run_until_too_large(self, work: Sequence[Work]) -> list[Work]:
        """Run batches until one does not fit the memory; return what is left then, cut smaller."""
        batches = self._cut(work)
        for number, batch in enumerate(batches):
            values = self._compute(batch)
            if values is None:
                return self._shrink(batch, [one for later in batches[number:] for one in later])
            self._on_values([each for one in batch for each in one.numbers], values)
        return []

    def _compute(self, batch: Sequence[Work]) -> Tensor | None:
        """Compute a batch; None if it does not fit.  On return nothing holds the memory it had taken."""
        try:
            if batch[0].prefix:
                return self._reader.read_forks([one.fork() for one in batch])
            return self._reader.read(
                [one.tokens[0] for one in batch], ranges=[one.ranges[0] for one in batch]
            )
        except torch.OutOfMemoryError:
            return None

    def _cut(self, work: Sequence[Work]) -> list[list[Work]]:
        """Cut work of one kind into batches, the shortest first.

        So the last batch has the fewest rows: while its values are copied, nothing else runs.  What fills no
        batch is the longest, next to what the following part brings: `TokenBudgetBatches` cuts the other way.
        """
        batches: list[list[Work]] = []
        for cost, one in sorted(((one.cost, one) for one in work), key=lambda pair: pair[0]):
            rows = len(batches[-1]) + 1 if batches else 0
            if rows and rows * cost <= self._batch_tokens and rows <= (self._max_rows or rows):
                batches[-1].append(one)
            else:
                batches.append([one])
        return batches

    def _split_full(self, work: Sequence[Work]) -> tuple[list[Work], list[Work]]:
        """Return work that fills batches, and the last batch of forks and of single sequences each."""
        ready: list[Work] = []
        rest: list[Work] = []
        for kind in _by_kind(work):
            if kind:
                *full, last = self._cut(kind)
                ready += [one for batch in full for one in batch]
                rest += last
        return ready, rest

    def _shrink(self, batch: Sequence[Work], left: list[Work]) -> list[Work]:
        """Halve the budget, or take a lone fork apart, after `batch` did not fit."""
        device = self._reader.device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # blocks cut for the large batch are of no use to smaller ones
        longest = max(one.cost for one in batch)
        if len(batch) == 1 and not batch[0].prefix:
            raise BatchDoesNotFit(
                f"a text of {longest} tokens does not fit the memory of {device}",
                hint="shorten it, extract fewer layers, or shard the model over several GPUs",
            )
        if len(batch) == 1:
            return [part for one in left for part in (one.apart() if one is batch[0] else [one])]
        self._batch_tokens = max(1, min(self._batch_tokens, longest * len(batch)) // 2)
        warnings.warn(
            f"a batch of {len(batch)} texts and {longest * len(batch)} tokens did not fit the memory of"
            f" {device}. The rest runs with batches of {self._batch_tokens} tokens, which may be slower."
            f" Other work on the device, or long texts, leave less room than assumed."
            f" Give batch_tokens={self._batch_tokens} to start there.",
            RuntimeWarning,
            stacklevel=2,
        )
        return left


def _by_kind(work: Iterable[Work]) -> tuple[list[Work], list[Work]]:
    """Separate forks from single sequences: a batch holds one kind."""
    forks: list[Work] = []
    others: list[Work] = []
    for one in work:
        (forks if one.prefix else others).append(one)
    return forks, others
