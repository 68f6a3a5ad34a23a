"""Which request sits in which slot: the host's side of a generation.

The host knows without asking how far a living row is (every step emits one token), so it asks the device only
which rows have ended, once in `STRIDE` steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from flatout.errors import BadInput
from flatout.multiplex.cache import Prefixes, bucket_of
from flatout.multiplex.requests import Completion, Finished, Limits, Progress, Request, first_stop
from flatout.multiplex.rows import Rows

if TYPE_CHECKING:
    from flatout.multiplex.runner import State, Stepper

STRIDE = 16  # steps between two looks of the host; a finished row idles half of it on average
REASONS: tuple[Finished, ...] = ("stop", "eos", "length")  # by State.reason: a stop ends a row that runs


@dataclass(slots=True)
class Seat:
    """A request in a slot; `count` of its tokens were looked at, and none of them ends it."""

    number: int
    request: Request
    limit: int
    count: int = 0

    @property
    def num_positions(self) -> int:
        """Positions of the cache that the next step reads."""
        return len(self.request.prompt) + self.count


def _check_tile(seats: Sequence[Seat]) -> None:
    if len({seat.request.variant for seat in seats}) > 1:
        raise BadInput(
            f"requests {seats[0].number} to {seats[-1].number} share a tile and run different variants",
            hint="order requests by variant, or take tile=1",
        )


class Schedule:
    """One call of `Generator.generate`: `refill`, `run` and `collect` in turn until nothing is seated."""

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        state: State,
        stepper: Stepper,
        limits: Limits,
        prefixes: Prefixes,
        stop: Sequence[tuple[int, ...]],
        max_new_tokens: int,
        tile: int = 1,
    ) -> None:
        self._state = state
        self._stepper = stepper
        self._limits = limits
        self._prefixes = prefixes
        self._stop = stop
        self._tile = tile
        self._max_new_tokens = max_new_tokens
        self._num_requests: int | None = None
        if isinstance(requests, Sequence):  # all can be checked before the first runs
            self._num_requests = len(requests)
            for number, request in enumerate(requests):
                limits.check(request, number, max_new_tokens=max_new_tokens)
        self._waiting = self._seats_of(requests)
        self._seats: dict[int, Seat] = {}
        self._done: dict[int, Completion] = {}
        self._num_tokens = 0  # of what is done
        state.alive.zero_()

    def _seats_of(self, requests: Iterable[Request]) -> Iterator[Seat]:
        for number, request in enumerate(requests):
            limit = self._limits.check(request, number, max_new_tokens=self._max_new_tokens)
            yield Seat(number, request, limit)

    def refill(self) -> bool:
        """Give the free slots to the next requests; False if no slot is taken."""
        taken: dict[int, Seat] = {}
        for first in range(0, len(self._state.alive), self._tile):
            slots = range(first, first + self._tile)
            if not any(slot in self._seats for slot in slots):
                seats = tuple(islice(self._waiting, self._tile))
                _check_tile(seats)
                taken.update(zip(slots, seats, strict=False))
        if taken:
            self._seats.update(taken)
            self._write_state(taken)
            self._prefill({slot: seat.request for slot, seat in taken.items()})
        return bool(self._seats)

    def _write_state(self, taken: dict[int, Seat]) -> None:
        state, requests = self._state, [seat.request for seat in taken.values()]
        device = state.token.device
        where = torch.tensor(list(taken), device=device)
        rows = [
            (seat.request.prompt[-1], len(seat.request.prompt) - 1, seat.limit, seat.request.key)
            for seat in taken.values()
        ]
        columns = torch.tensor(rows, device=device).unbind(1)
        for buffer, column in zip(
            (state.token, state.position, state.limit, state.key), columns, strict=True
        ):
            buffer[where] = column
        state.count[where] = 0
        state.reason[where] = 0
        state.alive[where] = True
        variants = tuple(request.variant for request in requests)
        state.tables.write(where, Rows(variants, tuple(request.sign for request in requests)))
        state.cache.clear(where)

    def _prefill(self, taken: dict[int, Request]) -> None:
        """All prompt tokens but the last, shared parts first and once."""
        num_alike = Counter(request.prompt for request in taken.values() if request.variant is None)
        shared: dict[int, int] = {}
        for slot, request in taken.items():
            alike = request.variant is None and num_alike[request.prompt] > 1
            shared[slot] = len(request.prompt) - 1 if alike else request.shared
        by_prefix: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for slot, request in taken.items():
            if shared[slot]:
                by_prefix[request.prompt[: shared[slot]]].append(slot)
        self._begin(by_prefix, keep={request.prompt[: request.shared] for request in taken.values()})
        for begun in (False, True):  # rows that start at 0 need no mask
            slots = [slot for slot in taken if bool(shared[slot]) == begun]
            rests = [taken[slot].prompt[shared[slot] : -1] for slot in slots]
            self._stepper.prefill(self._state, slots, rests, start=[shared[slot] for slot in slots])

    def _begin(self, by_prefix: dict[tuple[int, ...], list[int]], *, keep: set[tuple[int, ...]]) -> None:
        """Begin the slots of every prefix with it: held from before, or computed in the first of them."""
        cache = self._state.cache
        held = {prefix: self._prefixes.find(prefix) for prefix in by_prefix}
        absent = [prefix for prefix, found in held.items() if found is None]
        firsts = [by_prefix[prefix][0] for prefix in absent]
        self._stepper.prefill(self._state, firsts, absent, plain=True)
        for prefix, slots in by_prefix.items():
            found = held[prefix]
            targets = slots if found is not None else slots[1:]
            if found is None:
                if not targets and prefix not in keep:
                    continue
                found = cache.take(slots[0], length=len(prefix))
                if prefix in keep:
                    self._prefixes.keep(prefix, found)
            if targets:
                cache.put(torch.tensor(targets, device=cache.storage.device), found)

    def run(self) -> None:
        """Steps until the host has to look again."""
        seats = self._seats.values()
        num_steps = min(STRIDE, max(seat.limit - seat.count for seat in seats))
        furthest = max(seat.num_positions + min(num_steps, seat.limit - seat.count) - 1 for seat in seats)
        for _ in range(num_steps):
            self._stepper.step(self._state, bucket=bucket_of(furthest))

    def collect(self) -> list[Completion]:
        """What has finished since the last look; its slots are free."""
        state = self._state
        alive, reasons, counts = torch.stack((state.alive.long(), state.reason, state.count)).tolist()
        looked = [slot for slot in self._seats if self._stop or not alive[slot]]
        finished, stopped = [], []
        for slot, tokens in zip(looked, self._emitted(looked, counts), strict=True):
            seat = self._seats[slot]
            end = first_stop(tokens, self._stop, since=seat.count)
            reason: Finished = REASONS[reasons[slot]] if end is None else "stop"
            if end is not None or not alive[slot]:
                finished.append(Completion(request=seat.request, tokens=tokens[:end], finished=reason))
                self._done[seat.number] = finished[-1]
                self._num_tokens += len(finished[-1].tokens)
                stopped += [slot] if alive[slot] else []
                del self._seats[slot]
        if stopped:
            state.alive[torch.tensor(stopped, device=state.alive.device)] = False
        for slot, seat in self._seats.items():
            seat.count = counts[slot]
        return finished

    def _emitted(self, slots: list[int], counts: list[int]) -> list[tuple[int, ...]]:
        if not slots:
            return []
        longest = max(counts[slot] for slot in slots)
        rows = self._state.emitted[torch.tensor(slots, device=self._state.emitted.device), :longest].tolist()
        return [tuple(row[: counts[slot]]) for slot, row in zip(slots, rows, strict=True)]

    def progress(self) -> Progress:
        """How far the generation is."""
        return Progress(
            num_finished=len(self._done),
            num_requests=self._num_requests,
            num_tokens=self._num_tokens + sum(seat.count for seat in self._seats.values()),
        )

    def completions(self) -> list[Completion]:
        """Everything that has finished, in the order of the requests."""
        return [self._done[number] for number in sorted(self._done)]
