"""Which samples make a batch: by tokens or by rows, the same on every run, shared out among ranks.

A batch of a fixed number of rows is as slow as its longest sample and as empty as its shortest: memory is
sized for the worst batch, and the rest is padding.  A budget of tokens with samples of similar length
together fills every batch alike.  How the batches are cut depends on the lengths only, so their number is
the same in every epoch; shuffling exchanges samples within a bucket and the order of the batches.

Ranks must take the same number of steps, or the last one waits for ever.  A missing batch is made by halving
another, which never exceeds the budget and neither drops nor repeats a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from flatout.data.rows.padding import Longs
from flatout.ground.errors import BadInput


class EpochBatches(Sampler[list[int]]):
    """Batches of one rank, reshuffled every epoch; the base of the samplers below.

    Iterating yields lists of indices, `arrays()` the same batches as arrays.  A finished epoch is followed
    by the next; `set_epoch` chooses one.  `state_dict(done=k)` says where training is after `k` batches of
    this epoch (default: all that were handed out; a loader with workers asks ahead), and the sampler that
    loads it continues there.
    """

    def __init__(
        self,
        first: Longs,
        last: Longs,
        *,
        buckets: npt.NDArray[Any],
        shuffle: bool,
        seed: int,
        rank: int | None,
        num_ranks: int | None,
    ) -> None:
        """Batch i holds the samples at places first[i] to last[i] of the samples sorted by `buckets`."""
        self.rank, self.num_ranks = _rank_of(rank, num_ranks)
        self.num_samples = len(buckets)
        self._first, self._last = _as_multiple(first, last, self.num_ranks)
        self.num_repeated = int((self._last - self._first).sum()) - int(last[-1])
        self._buckets, self._shuffle, self._seed = buckets, shuffle, seed
        self.epoch = 0
        self._done = 0  # batches handed out by the running iteration
        self._resume_at = 0

    def __len__(self) -> int:
        """Count the batches of this rank in a whole epoch."""
        return len(self._first) // self.num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.arrays():
            yield batch.tolist()

    def arrays(self) -> Iterator[Longs]:
        """Yield the batches of this epoch as arrays of indices."""
        if self._resume_at >= len(self):
            self.epoch, self._resume_at = self.epoch + 1, 0
        order, steps = self._shuffled()
        at, self._resume_at = self._resume_at, 0
        for step in range(at, len(self)):
            batch = steps[step] * self.num_ranks + self.rank
            self._done = step + 1
            if self._done == len(self):
                self._resume_at = len(self)
            yield order[self._first[batch] : self._last[batch]]

    def _shuffled(self) -> tuple[Longs, Longs]:
        """Return the samples in the order of their places, and the order of the steps."""
        if not self._shuffle:
            return np.argsort(self._buckets, kind="stable"), np.arange(len(self))
        random = np.random.default_rng([self._seed, self.epoch])
        mixed = random.permutation(self.num_samples)
        return mixed[np.argsort(self._buckets[mixed], kind="stable")], random.permutation(len(self))

    def set_epoch(self, epoch: int) -> None:
        """Iterate epoch `epoch` next; a loaded state still resumes inside the epoch that it was saved in."""
        if epoch != self.epoch or self._resume_at >= len(self):
            self._resume_at = self._done = 0
        self.epoch = epoch

    def state_dict(self, *, done: int | None = None) -> dict[str, Any]:
        handed_out = self._resume_at or self._done
        return {"epoch": self.epoch, "done": handed_out if done is None else done, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        wrong = [
            f"{name} is {value}, the state has {state.get(name)}"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        if wrong:
            raise BadInput(
                "the state was saved by another sampler: " + "; ".join(wrong),
                hint="build the sampler as it was when the state was saved",
            )
        self.epoch, self._resume_at, self._done = state["epoch"], state["done"], state["done"]

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self._seed,
            "num_samples": self.num_samples,
            "num_batches": len(self),
            "num_ranks": self.num_ranks,
        }


class TokenBudgetBatches(EpochBatches):
    """As many samples per batch as a budget of tokens holds, samples of similar length together.

    `tokens` bounds rows times the longest sample (what a padded batch computes), or with `packed` the sum
    of the lengths.  `spread` is how far, as a share, lengths within a bucket may differ: 0 pads least,
    more mixes better.  Every rank gets the same number of batches, and the ranks' batches of one step have
    similar lengths, so that none waits for another.  Rank and number of ranks default to those of
    torch.distributed.  Without `shuffle` the longest come first.
    """

    def __init__(
        self,
        lengths: Any,
        *,
        tokens: int,
        max_rows: int | None = None,
        packed: bool = False,
        spread: float = 0.05,
        too_long: Literal["error", "alone"] = "error",
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        longs = _checked_lengths(lengths)
        if tokens < 1 or (max_rows is not None and max_rows < 1) or spread < 0:
            raise BadInput(
                f"tokens={tokens} and max_rows={max_rows} must be at least 1, spread={spread} at least 0"
            )
        if too_long not in ("error", "alone"):
            raise BadInput(f"too_long={too_long!r} is neither 'error' nor 'alone'")
        over = np.flatnonzero(longs > tokens)
        if len(over) and too_long == "error":
            raise BadInput(
                f"sample {over[0]} has {longs[over[0]]} tokens, the budget of a batch is {tokens};"
                f" {len(over)} of {len(longs)} samples are too long",
                hint="raise tokens, drop these samples, or give each its own batch with too_long='alone'",
            )
        buckets, longest = _bucketed(longs, spread)
        following = _following(longest, tokens=tokens, max_rows=max_rows, packed=packed)
        first = _chain(following)
        last = np.append(first[1:], len(longs))
        super().__init__(
            first, last, buckets=buckets, shuffle=shuffle, seed=seed, rank=rank, num_ranks=num_ranks
        )


class RowBatches(EpochBatches):
    """Batches of `rows` samples; `drop_last` leaves out what does not fill a batch on every rank."""

    def __init__(
        self,
        num_samples: int,
        *,
        rows: int,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        if num_samples < 1 or rows < 1:
            raise BadInput(f"num_samples={num_samples} and rows={rows} must be at least 1")
        rank, num_ranks = _rank_of(rank, num_ranks)
        num_batches = num_samples // (rows * num_ranks) * num_ranks if drop_last else -(-num_samples // rows)
        if num_batches == 0:
            raise BadInput(
                f"{num_samples} samples do not fill one batch of {rows} on each of {num_ranks} ranks"
            )
        first = np.arange(num_batches) * rows
        super().__init__(
            first,
            np.minimum(first + rows, num_samples),
            buckets=np.zeros(num_samples, dtype=np.uint8),
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            num_ranks=num_ranks,
        )


def _rank_of(rank: int | None, num_ranks: int | None) -> tuple[int, int]:
    if (rank is None) != (num_ranks is None):
        raise BadInput(f"rank={rank} and num_ranks={num_ranks}: give both or neither")
    if rank is None or num_ranks is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    if not 0 <= rank < num_ranks:
        raise BadInput(f"rank={rank} is not one of {num_ranks} ranks")
    return rank, num_ranks


def _checked_lengths(lengths: Any) -> Longs:
    longs = np.asarray(lengths)
    if longs.ndim != 1 or not len(longs) or longs.dtype.kind not in "iu":
        raise BadInput(f"lengths are one whole number per sample, not {longs.dtype} of shape {longs.shape}")
    if (negative := np.flatnonzero(longs < 0)).size:
        raise BadInput(f"sample {negative[0]} has a negative length, {longs[negative[0]]}")
    return longs.astype(np.int64)


def _bucketed(lengths: Longs, spread: float) -> tuple[npt.NDArray[Any], Longs]:
    """Return every sample's bucket, 0 for the longest; and for every place the longest of its bucket."""
    distinct, which = _distinct(np.maximum(lengths, 1))
    keys = np.floor(np.log(distinct) / np.log1p(spread)).astype(np.int64) if spread else distinct
    found, bucket_of = np.unique(-keys, return_inverse=True)
    longest = np.zeros(len(found), dtype=np.int64)
    np.maximum.at(longest, bucket_of, distinct)
    # NumPy sorts 16-bit integers by counting, several times faster than wider ones
    narrow = np.uint16 if len(found) <= np.iinfo(np.uint16).max else np.int64
    buckets = bucket_of.astype(narrow)[which]
    return buckets, np.repeat(longest, np.bincount(buckets))


def _distinct(lengths: Longs) -> tuple[Longs, Longs]:
    """Return the distinct lengths, and which of them every sample has; counted where that is cheap."""
    if lengths.max() > 4 * len(lengths) + 65536:
        return np.unique(lengths, return_inverse=True)
    there = np.bincount(lengths) > 0
    return np.flatnonzero(there), (np.cumsum(there) - 1)[lengths]


def _following(longest: Longs, *, tokens: int, max_rows: int | None, packed: bool) -> Longs:
    """Return, for every place, the place after the last of a batch that begins there."""
    places = np.arange(len(longest))
    if packed:
        total = np.cumsum(longest)
        following = np.searchsorted(total, total - longest + tokens, side="right")
    else:
        following = places + tokens // longest
    return np.clip(following, places + 1, places + (max_rows or len(longest)))


def _chain(following: Longs) -> Longs:
    """Return the places at which batches begin, from 0 on."""
    steps, place, first = following.tolist(), 0, []
    while place < len(steps):
        first.append(place)
        place = steps[place]
    return np.array(first)


def _as_multiple(first: Longs, last: Longs, num_ranks: int) -> tuple[Longs, Longs]:
    """Halve the largest batches until their number is a multiple; single samples are repeated instead."""
    while missing := -len(first) % num_ranks:
        rows = last - first
        largest = np.argsort(-rows, kind="stable")[:missing]
        halved = largest[rows[largest] > 1]
        if not len(halved):
            again = np.resize(np.arange(len(first)), missing)
            return np.append(first, first[again]), np.append(last, last[again])
        middle = first[halved] + rows[halved] // 2
        first, last = np.sort(np.append(first, middle)), np.sort(np.append(last, middle))
    return first, last
