"""What a step takes on each of several GPUs, by arithmetic on the trace of one.

DDP.  Every rank holds everything, and the reducer also holds flat buckets of all gradients:

    buckets = the gradients' bytes, from construction on, in one bucket for the first step and cut into
              buckets of 1 MiB and then 25 MiB, in the order in which gradients come, for the next
    at construction parameters and buffers are broadcast through flat copies of 250 MiB, two at a time

The gradient that brings a bucket to its size closes it.  This assumes that all gradients have one dtype and
that every trainable parameter gets one; they come in the reverse order of the parameters if none is frozen.

FSDP2, `fully_shard` on each block (see `fsdp_units`) and on the model, with its defaults:

    parameters, optimizer state   each parameter's largest chunk
    forward of a block            its gathered parameters, and the flat buffer they came through, which is
                                  freed only when the next block's has arrived
    backward of a block           its gathered parameters, the flat buffer of the block that is next, and its
                                  whole gradients; then the flat input of its reduce-scatter (kept until the
                                  next block's) and the flat output, of which its gradients are views
    root                          gathered from the start of the forward to the end of the backward

The names of modules show where the forward of a block is; its backward ends when the last of its gradients is
born, found by their sizes.  Not modelled: the communication library's own buffers; streams (memory freed on
one is not reused on another, so more is reserved than this simulation of one stream says); mixed-precision
policies; blocks that are called more than once in a step, which count as gathered once in backward; and
accumulation, whose trace is refused.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import StepPhase
from flatout.memory.predict.fsdp_units import ROOT, ShardedParameter, ShardUnit, block_of_name
from flatout.memory.predict.trace_edit import Edit, StepMarks, gradients_of, steps_of
from flatout.memory.trace.record import Trace

MIB = 2**20
FIRST_BUCKET_BYTES = MIB
BUCKET_BYTES = 25 * MIB
BROADCAST_BYTES = 250 * MIB
ELEMENT_BYTES = (1, 2, 4, 8)  # what an optimizer may keep of one element
SMALL_BYTES = 512  # the optimizer's scalars are not sharded


def bucket_sizes(sizes: Iterable[int], *, limits: Sequence[int]) -> list[int]:
    """Return the bytes of DDP's buckets: a tensor that reaches the limit closes one; the last repeats."""
    closed: list[int] = []
    filled = 0
    for num_bytes in sizes:
        filled += num_bytes
        if filled >= limits[min(len(closed), len(limits) - 1)]:
            closed.append(filled)
            filled = 0
    return [*closed, filled] if filled else closed


def with_ddp(
    trace: Trace,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> Trace:
    """Return the trace of one rank of DistributedDataParallel."""
    steps = steps_of(trace)
    edit = Edit(trace)
    start = steps[0].start
    held = [
        each
        for each in trace.storages
        if each.phase == "setup" and each.component in ("parameters", "buffers")
    ]
    flat = bucket_sizes((each.num_bytes for each in held), limits=[BROADCAST_BYTES])
    copies = [edit.storage(num_bytes, "temporaries", "setup", "DDP broadcast") for num_bytes in flat]
    for number, copy in enumerate(copies):
        edit.before[start].append(copy)
        if number:
            edit.before[start].append(~copies[number - 1])
    edit.before[start] += [~copy for copy in copies[-1:]]
    gradients = gradients_of(trace, steps[0])
    sizes = _in_order_of_reduction(trace, gradients)
    everything = edit.storage(sum(sizes), "gradients", "setup", "DDP bucket")
    edit.before[start].append(everything)
    if len(steps) > 1:
        rebuilt = bucket_sizes(sizes, limits=[first_bucket_bytes, bucket_bytes])
        numbers = [edit.storage(num_bytes, "gradients", "forward", "DDP bucket") for num_bytes in rebuilt]
        edit.after[steps[1].forward] += [~everything, *numbers]
    return edit.trace()


def _in_order_of_reduction(trace: Trace, gradients: Sequence[int]) -> list[int]:
    """Return the gradients' bytes in reverse order of the parameters, or as they come if some are frozen."""
    as_they_come = [trace.storages[number].num_bytes for number in gradients]
    parameters = [each.num_bytes for each in trace.storages if each.component == "parameters"]
    return parameters[::-1] if sorted(parameters) == sorted(as_they_come) else as_they_come


def with_fsdp2(trace: Trace, *, ranks: int, units: Sequence[ShardUnit]) -> Trace:
    """Return the trace of the first of `ranks` ranks under `fully_shard`, which holds the largest chunks."""
    if ranks == 1:
        return trace
    _check_units(trace, units)
    steps = steps_of(trace)
    edit = Edit(trace)
    _shard_what_lasts(edit, units, steps, ranks)
    previous: list[int] = []
    for step in steps:
        if step.num_backwards > 1:
            raise BadInput(
                "FSDP2 can be planned only for steps of one micro-batch",
                hint="trace the job without accumulation",
            )
        for shard in previous:
            edit.after[step.start].append(~shard)
        previous = _Sharded(edit, step, units, ranks).run()
    return edit.trace()


def _check_units(trace: Trace, units: Sequence[ShardUnit]) -> None:
    given = sum(piece.num_bytes for unit in units for piece in unit.pieces)
    traced = sum(each.num_bytes for each in trace.storages if each.component == "parameters")
    if given != traced:
        raise BadInput(f"the units hold {given} bytes of parameters, the trace {traced}")


# Shards


def _shard_what_lasts(edit: Edit, units: Sequence[ShardUnit], steps: Sequence[StepMarks], ranks: int) -> None:
    """Cut parameters, the optimizer's state and what its step takes into chunks."""
    groups: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for number, storage in enumerate(edit.origin.storages):
        lasts = storage.component in ("parameters", "optimizer state")
        if lasts or (storage.phase == "optimizer" and storage.component == "temporaries"):
            step = sum(edit.births[number] >= each.start for each in steps)
            groups[storage.component, step, storage.num_bytes].append(number)
    for (component, _step, num_bytes), numbers in groups.items():
        pieces = [
            piece
            for unit in units
            for piece in (unit.pieces if component == "parameters" else unit.trainable)
            if piece.num_elements
            and num_bytes % piece.num_elements == 0
            and num_bytes // piece.num_elements in ELEMENT_BYTES
        ]
        same = [piece for piece in pieces if piece.num_bytes == num_bytes] or pieces
        for number, chunk in zip(numbers, _chunks(num_bytes, len(numbers), same, ranks), strict=True):
            edit.resize(number, chunk)


def _chunks(num_bytes: int, count: int, pieces: Sequence[ShardedParameter], ranks: int) -> list[int]:
    """Return the bytes of the chunks of `count` storages, which belong to these parameters in order."""
    if not pieces:
        return [num_bytes if num_bytes <= SMALL_BYTES else -(-num_bytes // ranks)] * count
    chunks = [piece.shard_elements(ranks) * num_bytes // piece.num_elements for piece in pieces]
    if count % len(chunks):
        return [max(chunks)] * count  # whose they are is not known
    return [chunks[number * len(chunks) // count] for number in range(count)]


class _Sharded:
    """One step's gathers and scatters, put into an edit."""

    def __init__(self, edit: Edit, step: StepMarks, units: Sequence[ShardUnit], ranks: int) -> None:
        self.edit, self.step, self.ranks = edit, step, ranks
        self.blocks = {unit.name: unit for unit in units if unit.name != ROOT and unit.pieces}
        self.root = next((unit for unit in units if unit.name == ROOT and unit.pieces), None)
        self.shards: list[int] = []
        self.kept: list[int] = []  # the input of the last reduce-scatter

    def run(self) -> list[int]:
        """Return the sharded gradients, which are alive when the step ends."""
        calls = self._calls()
        whole_root = self._forward(calls)
        order = list(dict.fromkeys(name for name, _start, _end in reversed(calls)))
        self._backward(order, whole_root)
        return self.shards

    def _calls(self) -> list[tuple[str, int, int]]:
        """List (block, its first event, the one after its last) of each call of a block's forward."""
        calls: list[tuple[str, int, int]] = []
        for at in range(self.step.forward, self.step.backward):
            event = int(self.edit.origin.events[at])
            module = self.edit.origin.storages[event].module if event >= 0 else None
            name = None if module is None else block_of_name(module)
            if name not in self.blocks or name is None:
                continue
            if calls and calls[-1][0] == name:
                calls[-1] = (name, calls[-1][1], at + 1)
            else:
                calls.append((name, at, at + 1))
        return calls

    def _gather(self, unit: ShardUnit, phase: StepPhase) -> tuple[int, list[int]]:
        """Add the flat buffer and the whole parameters of a unit."""
        flat = self.edit.storage(
            unit.gathered_bytes(self.ranks), "temporaries", phase, "FSDP all-gather", unit.name
        )
        whole = [
            self.edit.storage(
                piece.gathered_bytes(self.ranks), "parameters", phase, "FSDP all-gather", unit.name
            )
            for piece in unit.pieces
        ]
        return flat, whole

    def _forward(self, calls: Sequence[tuple[str, int, int]]) -> list[int]:
        edit = self.edit
        last_flat: list[int] = []
        whole_root: list[int] = []
        if self.root is not None:
            flat, whole_root = self._gather(self.root, "forward")
            edit.after[self.step.forward] += [flat, *whole_root]
            last_flat = [flat]
        for name, start, end in calls:
            flat, whole = self._gather(self.blocks[name], "forward")
            edit.after[start] += [flat, *(~each for each in last_flat), *whole]
            edit.before[end] += [~each for each in whole]
            last_flat = [flat]
        edit.before[self.step.backward] += [~each for each in last_flat]
        return whole_root

    def _backward(self, order: Sequence[str], whole_root: Sequence[int]) -> None:
        edit = self.edit
        ends, owned = self._ends(order)
        start = self.step.backward
        gathered = [self._gather(self.blocks[name], "backward") for name in order]
        if gathered:
            edit.after[start].append(gathered[0][0])
        for number, name in enumerate(order):
            flat, whole = gathered[number]
            opening = edit.after[start] if start == self.step.backward else edit.before[start]
            opening += [*whole, ~flat]
            if number + 1 < len(gathered):
                opening.append(gathered[number + 1][0])
            start = ends[name]
            edit.before[start] += [~each for each in whole]
            self._reduce(self.blocks[name], owned[name], at=start)
        end = self.step.optimizer
        edit.before[end] += [~each for each in whole_root]
        if self.root is not None:
            self._reduce(self.root, owned[ROOT], at=end)
        edit.before[end] += [~each for each in self.kept]

    def _reduce(self, unit: ShardUnit, gradients: Sequence[int], *, at: int) -> None:
        """Reduce whole gradients into a flat buffer, and that into this rank's chunk."""
        edit = self.edit
        edit.before[at] += [~each for each in self.kept]
        self.kept = []
        if not unit.trainable:
            return
        chunk = sum(piece.shard_bytes(self.ranks) for piece in unit.trainable)
        flat = edit.storage(chunk * self.ranks, "temporaries", "backward", "FSDP reduce-scatter", unit.name)
        shard = edit.storage(chunk, "gradients", "backward", "FSDP reduce-scatter", unit.name)
        for gradient in gradients:
            edit.drop_death(gradient)
        edit.before[at] += [flat, *(~each for each in gradients), shard]
        self.kept = [flat]
        self.shards.append(shard)

    def _ends(self, order: Sequence[str]) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Find where each block's backward ends, and the gradients of each unit by their sizes."""
        edit, step = self.edit, self.step
        missing = {name: Counter(p.num_bytes for p in self.blocks[name].trainable) for name in order}
        owned: dict[str, list[int]] = {ROOT: [], **{name: [] for name in order}}
        root = Counter(piece.num_bytes for piece in self.root.trainable) if self.root else Counter[int]()
        for gradient in gradients_of(edit.origin, step):
            num_bytes = edit.origin.storages[gradient].num_bytes
            owner = next((name for name in order if missing[name].total()), ROOT)
            if not missing.get(owner, root)[num_bytes] and not root[num_bytes]:
                owner = next((name for name in order if missing[name][num_bytes]), ROOT)
            elif owner != ROOT and not missing[owner][num_bytes]:
                owner = ROOT
            missing.get(owner, root)[num_bytes] -= 1
            owned[owner].append(gradient)
        ends: dict[str, int] = {}
        end = step.backward + 1
        for name in order:
            end = max([end, self._last_death(name), *(edit.births[number] + 1 for number in owned[name])])
            ends[name] = min(end, step.optimizer)
        return ends, owned

    def _last_death(self, name: str) -> int:
        """Find where the last activation of a block without gradients dies in the backward."""
        if self.blocks[name].trainable:
            return 0
        found = [
            edit_at + 1
            for number, edit_at in self.edit.deaths.items()
            if self.step.backward <= edit_at < self.step.optimizer
            and self.blocks[name].holds(self.edit.origin.storages[number].module)
        ]
        return max(found, default=0)
