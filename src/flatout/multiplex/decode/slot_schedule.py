"""Which request runs in which slot: the host's side of a generation.

The host knows how far a running row is (every step emits one token), so it asks the device only which rows
have ended, once in `STRIDE` steps.  A GPU does not wait for that: the answer is copied before the last step
of a stride, and the host reads it while that step runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from flatout.ground.errors import BadInput
from flatout.multiplex.decode.cache import Prefixes, bucket_of
from flatout.multiplex.decode.requests import (
    Completion,
    Finished,
    GenerationProgress,
    Limits,
    Request,
    first_stop,
)
from flatout.multiplex.decode.steppers import PromptPart
from flatout.multiplex.rows import Rows

if TYPE_CHECKING:
    from flatout.multiplex.decode.steppers import SlotState, Stepper

STRIDE = 8  # steps between two looks of the host; a finished row idles half of them on average
AHEAD = 1  # steps that a GPU runs while the host looks
REASONS: tuple[Finished, ...] = ("stop", "eos", "length")  # by SlotState.reason: a stop ends a row that runs


@dataclass(frozen=True, slots=True)
class Seat:
    """A request in a slot since step `since` of the generation, until `limit` steps later at the latest."""

    number: int
    request: Request
    limit: int
    since: int = 0

    def count(self, step: int) -> int:
        """Return how many tokens it has at a step, if nothing has ended it."""
        return max(0, min(step - self.since, self.limit))


def _check_tile(seats: Sequence[Seat]) -> None:
    if len({seat.request.variant for seat in seats}) > 1:
        raise BadInput(
            f"requests {seats[0].number} to {seats[-1].number} share a tile and run different variants",
            hint="order requests by variant, or use tile=1",
        )


class Schedule:
    """One call of `Generator.generate`: `refill`, `run` and `collect` in turn until no request is left."""

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        state: SlotState,
        stepper: Stepper,
        limits: Limits,
        prefixes: Prefixes,
        stop: Sequence[tuple[int, ...]],
        max_new_tokens: int,
        tile: int = 1,
        ahead: int | None = None,
    ) -> None:
        on_gpu = state.token.device.type == "cuda"
        self._state = state
        self._stepper = stepper
        self._limits = limits
        self._prefixes = prefixes
        self._stop = stop
        self._tile = tile
        self._max_new_tokens = max_new_tokens
        self._waiting = self._seats_of(requests)
        self._num_requests: int | None = None
        if isinstance(requests, Sequence):  # all can be checked before the first runs
            self._num_requests = len(requests)
            self._waiting = iter(list(self._waiting))
        self._seats: dict[int, Seat] = {}
        self._done: dict[int, Completion] = {}
        self._num_tokens = 0  # of what is done
        self._step = self._looked = 0  # steps begun, and those of the last look
        self._ahead = (AHEAD if on_gpu else 0) if ahead is None else ahead
        self._look = _Look(state)
        state.alive.zero_()

    def _seats_of(self, requests: Iterable[Request]) -> Iterator[Seat]:
        for number, request in enumerate(requests):
            limit = self._limits.check(request, number, max_new_tokens=self._max_new_tokens)
            yield Seat(number, request, limit)

    def refill(self) -> bool:
        """Give the free slots to the next requests; False if no slot is taken."""
        taken: dict[int, Seat] = {}
        num_slots = len(self._state.alive)
        for first in range(0, num_slots, self._tile) if len(self._seats) < num_slots else ():
            slots = range(first, first + self._tile)
            if not any(slot in self._seats for slot in slots):
                seats = tuple(replace(seat, since=self._step) for seat in islice(self._waiting, self._tile))
                _check_tile(seats)
                taken.update(zip(slots, seats, strict=False))
        if taken:
            self._seats.update(taken)
            self._write_state(taken)
            self._prefill({slot: seat.request for slot, seat in taken.items()})
        if taken or not self._seats:
            self._seats_changed()
        return bool(self._seats)

    def _seats_changed(self) -> None:
        seats = self._seats.values()
        self._last_step = max((seat.since + seat.limit for seat in seats), default=self._step)
        self._furthest = max((len(seat.request.prompt) - seat.since for seat in seats), default=0)
        self._longest = max((len(seat.request.prompt) + seat.limit for seat in seats), default=0)

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
        # A prompt that goes on from a shared prefix is always run by a step that reads beyond.
        unclean = [slot for slot, seat in taken.items() if self._stepper.reads_beyond or seat.request.shared]
        state.cache.clear(unclean)

    def _prefill(self, taken: dict[int, Request]) -> None:
        """Run all prompt tokens but the last, shared parts first and once."""
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
            rests = [
                PromptPart(slot, request.prompt[shared[slot] : -1], shared[slot])
                for slot, request in taken.items()
                if bool(shared[slot]) == begun
            ]
            self._stepper.prefill(self._state, rests)

    def _begin(self, by_prefix: dict[tuple[int, ...], list[int]], *, keep: set[tuple[int, ...]]) -> None:
        """Begin the slots of every prefix with it: held from before, or computed in the first of them."""
        cache = self._state.cache
        held = {prefix: self._prefixes.find(prefix) for prefix in by_prefix}
        absent = [PromptPart(by_prefix[prefix][0], prefix) for prefix, found in held.items() if found is None]
        self._stepper.prefill(self._state, absent, plain=True)
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
        """Run steps until the host has to look again."""
        num_steps = min(STRIDE, self._last_step - self._step)
        end = self._step + num_steps
        ahead = self._ahead if end < self._last_step and num_steps > self._ahead else 0
        bucket = bucket_of(min(self._furthest + end, self._longest) - 1)
        for _ in range(num_steps - ahead):
            self._stepper.step(self._state, bucket=bucket)
        self._look.begin()
        for _ in range(ahead):
            self._stepper.step(self._state, bucket=bucket)
        self._step, self._looked_before, self._looked = end, self._looked, end - ahead

    def collect(self) -> list[Completion]:
        """Return what has finished since the last look, and free its slots."""
        alive, reasons, counts = self._look.seen()
        looked = [slot for slot in self._seats if self._stop or not alive[slot]]
        finished, stopped = [], []
        for slot, tokens in zip(looked, self._look.emitted(looked, counts), strict=True):
            seat = self._seats[slot]
            end = first_stop(tokens, self._stop, since=seat.count(self._looked_before))
            reason: Finished = REASONS[reasons[slot]] if end is None else "stop"
            if end is not None or not alive[slot]:
                finished.append(Completion(request=seat.request, tokens=tokens[:end], finished=reason))
                self._done[seat.number] = finished[-1]
                self._num_tokens += len(finished[-1].tokens)
                stopped += [slot] if alive[slot] else []
                del self._seats[slot]
        if stopped:
            alive_now = self._state.alive
            alive_now[torch.tensor(stopped, device=alive_now.device)] = False
        if finished:
            self._seats_changed()
        return finished

    def progress(self) -> GenerationProgress:
        """Return how far the generation is."""
        return GenerationProgress(
            num_finished=len(self._done),
            num_requests=self._num_requests,
            num_tokens=self._num_tokens + sum(seat.count(self._looked) for seat in self._seats.values()),
        )

    def completions(self) -> list[Completion]:
        """Return everything that has finished, in the order of the requests."""
        return [self._done[number] for number in sorted(self._done)]


class _Look:
    """What a state says at one moment, for a host that reads it later."""

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self._on_gpu = state.token.device.type == "cuda"
        self._said = torch.empty(3, len(state.alive), dtype=torch.int64, pin_memory=self._on_gpu)
        if self._on_gpu:
            self._moment = torch.cuda.Event()
            self._aside = torch.cuda.Stream(state.token.device)

    def begin(self) -> None:
        """Copy which rows live, why others ended, and how many tokens all have."""
        state = self._state
        said = torch.stack((state.alive.long(), state.reason, state.count))
        self._said.copy_(said, non_blocking=self._on_gpu)
        if self._on_gpu:
            self._moment.record()

    def seen(self) -> list[list[int]]:
        if self._on_gpu:
            self._moment.synchronize()
        found: list[list[int]] = self._said.tolist()
        return found

    def emitted(self, slots: list[int], counts: list[int]) -> list[tuple[int, ...]]:
        """Return the tokens that rows had at that moment, without waiting for later steps."""
        if not slots:
            return []
        longest = max(counts[slot] for slot in slots)
        if self._on_gpu:
            self._aside.wait_event(self._moment)
        with torch.cuda.stream(self._aside) if self._on_gpu else nullcontext():
            emitted = self._state.emitted
            rows = emitted[torch.tensor(slots, device=emitted.device), :longest].tolist()
        return [tuple(row[: counts[slot]]) for slot, row in zip(slots, rows, strict=True)]
