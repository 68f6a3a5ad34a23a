"""What an extraction has to compute, cut into batches that fit.

A piece of work is one sequence, or a fork: two sequences that begin alike.  A fork computes the common part
once, at the price of a second pass for the endings.  That pass is short, but a pass over few tokens takes as
long as one over some hundred: it reads every weight either way.  So forks pay where what they save in a batch
is more than that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.decisions import Decision
from flatout.engines.steering.extract.layer_reader import Fork, Range, Reader, Tokens
from flatout.engines.steering.extract.tokens import common_tokens
from flatout.errors import BatchDoesNotFit

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
        """The sequences each by itself."""
        return [
            Work(numbers=(number,), tokens=(tokens,), ranges=(one,))
            for number, tokens, one in zip(self.numbers, self.tokens, self.ranges, strict=True)
        ]


def planned(
    missing: Sequence[int],
    *,
    sequences: Sequence[Tokens],
    ranges: Sequence[Range],
    pairs: Sequence[tuple[int, int]],
) -> list[Work]:
    """The missing sequences: as forks where they are pairs that begin alike, else each by itself."""
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
    """Whether to compute what pairs share once."""
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


def run_batches(
    reader: Reader,
    parts: Iterable[Sequence[Work]],
    *,
    batch_tokens: int,
    on_values: Callable[[Sequence[int], Tensor], None],
    max_rows: int | None = None,
) -> None:
    """Compute all work, of each part the shortest first; what fills no batch waits for the next part.

    The first parts wait for nothing, so that the device begins.  A batch that runs out of memory halves the
    budget of the rest.
    """
    waiting: list[Work] = []
    for number, part in enumerate(parts):
        ready, waiting = [*waiting, *part], []
        if number >= STARTING_PARTS:
            ready, waiting = _full(ready, batch_tokens=batch_tokens, max_rows=max_rows)
        batch_tokens = _run(reader, ready, batch_tokens=batch_tokens, on_values=on_values, max_rows=max_rows)
    _run(reader, waiting, batch_tokens=batch_tokens, on_values=on_values, max_rows=max_rows)


def _batches(work: Sequence[Work], *, batch_tokens: int, max_rows: int | None) -> list[list[int]]:
    """Places of work that is computed together, the shortest first.

    So the last batch has the fewest rows: while its values come home, nothing else runs.  And what fills no
    batch is the longest, next to what the part that follows brings: `TokenBudgetBatches` cuts the other way.
    """
    batches: list[list[int]] = []
    costs = [one.cost for one in work]
    for place in sorted(range(len(work)), key=costs.__getitem__):
        rows = len(batches[-1]) + 1 if batches else 0
        if rows and rows * costs[place] <= batch_tokens and rows <= (max_rows or rows):
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def _full(work: Sequence[Work], *, batch_tokens: int, max_rows: int | None) -> tuple[list[Work], list[Work]]:
    """Work that fills batches, and the rest: of forks and of single sequences the last batch each."""
    ready: list[Work] = []
    rest: list[Work] = []
    for kind in ([one for one in work if one.prefix], [one for one in work if not one.prefix]):
        if kind:
            *full, last = _batches(kind, batch_tokens=batch_tokens, max_rows=max_rows)
            ready += [kind[place] for places in full for place in places]
            rest += [kind[place] for place in last]
    return ready, rest


def _run(
    reader: Reader,
    work: Sequence[Work],
    *,
    batch_tokens: int,
    on_values: Callable[[Sequence[int], Tensor], None],
    max_rows: int | None,
) -> int:
    """Compute all of it; the budget of tokens that was left in the end."""
    left = list(work)
    while left:
        forks = [one for one in left if one.prefix]
        others = [one for one in left if not one.prefix] if forks else []
        rest, batch_tokens = _run_some(
            reader, forks or left, batch_tokens=batch_tokens, on_values=on_values, max_rows=max_rows
        )
        left = rest + others
    return batch_tokens


def _run_some(
    reader: Reader,
    work: list[Work],
    *,
    batch_tokens: int,
    on_values: Callable[[Sequence[int], Tensor], None],
    max_rows: int | None,
) -> tuple[list[Work], int]:
    """Run batches until one does not fit; what is left then, and the budget to try it with."""
    done: set[int] = set()
    for places in _batches(work, batch_tokens=batch_tokens, max_rows=max_rows):
        batch = [work[place] for place in places]
        numbers = [number for one in batch for number in one.numbers]
        values = _values(reader, batch)
        if values is None:
            left = [one for place, one in enumerate(work) if place not in done]
            return _smaller(batch, left, batch_tokens=batch_tokens, device=reader.device)
        on_values(numbers, values)
        done.update(places)
    return [], batch_tokens


def _values(reader: Reader, batch: Sequence[Work]) -> Tensor | None:
    """What a batch gives; None if it does not fit.  On return nothing holds the memory it had taken."""
    try:
        if batch[0].prefix:
            return reader.read_forks([one.fork() for one in batch])
        return reader.read([one.tokens[0] for one in batch], ranges=[one.ranges[0] for one in batch])
    except torch.OutOfMemoryError:
        return None


def _smaller(
    batch: Sequence[Work], left: list[Work], *, batch_tokens: int, device: torch.device
) -> tuple[list[Work], int]:
    """The work that is left in smaller pieces, after `batch` did not fit."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # blocks cut for the large batch are of no use to smaller ones
    longest = max(one.cost for one in batch)
    if len(batch) == 1 and not batch[0].prefix:
        raise BatchDoesNotFit(
            f"a text of {longest} tokens does not fit the memory of {device}",
            hint="shorten it, take fewer layers, or shard the model over several GPUs",
        )
    if len(batch) == 1:
        alone = batch[0].apart()
        return [part for one in left for part in (alone if one is batch[0] else [one])], batch_tokens
    halved = max(1, min(batch_tokens, longest * len(batch)) // 2)
    warnings.warn(
        f"a batch of {len(batch)} texts and {longest * len(batch)} tokens did not fit the memory of {device}."
        f" The rest runs with batches of {halved} tokens, which may be slower. Other work on the device, or"
        f" long texts, leave less room than assumed. Give batch_tokens={halved} to start there.",
        RuntimeWarning,
        stacklevel=2,
    )
    return left, halved
