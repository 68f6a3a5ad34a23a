"""Slots of a generation on the device, and the ways to run one step of them.

All state lies in buffers that keep their addresses: a step reads them and writes them, waits for nothing and
takes no shape from a value.  So a step can be captured as a CUDA graph (one for each bucket of positions that
attention reads) and replayed without the host.

A finished row keeps computing at its last position, and what it writes is never read.  That costs nothing
beside the other rows, and keeps every shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.multiplex.decode import forward
from flatout.multiplex.decode.cache import Cache, bucket_of
from flatout.multiplex.decode.sampling import Sampling, pick
from flatout.multiplex.noise.draws import uniform_key
from flatout.multiplex.rows import Rows, RowTables

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.multiplex.factors import Factors
    from flatout.multiplex.models.decoder import Decoder

Mode = Literal["auto", "eager", "compiled", "graph", "fused"]

PREFILL_TOKENS = 16384  # tokens, padding included, of one prefill batch: bounds the memory of its activations
MAX_COMPILED = 64  # beyond it the compiler would fall back to eager steps
MOST_READS = 256  # tensors that one compiled sum may read: three for each rank and a few
RUNNING, EOS, LENGTH = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotState:
    """Buffers [slots]: `token` stands at `position` and is read next; `emitted` is [slots, tokens]."""

    token: Tensor
    position: Tensor
    alive: Tensor
    reason: Tensor  # why a row has ended: EOS or LENGTH; RUNNING until then
    count: Tensor  # tokens emitted
    limit: Tensor
    key: Tensor
    emitted: Tensor
    eos: Tensor  # token ids that end a row
    tables: RowTables
    cache: Cache

    @classmethod
    def empty(cls, decoder: Decoder, *, slots: int, max_tokens: int, eos: Sequence[int]) -> SlotState:
        """Make buffers in which no slot is alive."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=decoder.device)

        return cls(
            token=zeros(slots),
            position=zeros(slots),
            alive=zeros(slots, dtype=torch.bool),
            reason=zeros(slots),
            count=zeros(slots),
            limit=zeros(slots),
            key=zeros(slots),
            emitted=zeros(slots, max_tokens),
            eos=torch.tensor(sorted(set(eos)), dtype=torch.int64, device=decoder.device),
            tables=Rows.plain(slots).tables(decoder.device),
            cache=Cache.empty(decoder, slots=slots, max_tokens=max_tokens),
        )

    def advance(self, chosen: Tensor) -> None:
        """Append the token that each living row has chosen, and end the rows that are through."""
        rows = torch.arange(len(chosen), device=chosen.device)
        self.emitted[rows, self.count] = chosen  # past the end of a dead row, where nothing is read
        self.count.add_(self.alive)
        self.position.add_(self.alive)
        self.token.copy_(torch.where(self.alive, chosen, self.token))
        ended = self.alive & (chosen[:, None] == self.eos).any(-1)
        full = self.alive & ~ended & (self.count >= self.limit)
        self.reason.add_(ended * EOS + full * LENGTH)
        self.alive.logical_and_(~(ended | full))

    def changing(self) -> tuple[Tensor, ...]:
        """Return what a step writes, without the cache: a position of that is written before it is read."""
        return (self.token, self.position, self.alive, self.reason, self.count, self.emitted)


class PromptPart(NamedTuple):
    """Tokens of a prompt on their way into a slot, from a position on."""

    slot: int
    tokens: tuple[int, ...]
    start: int = 0


class Stepper(Protocol):
    """A way to run the slots of a `SlotState`.

    `reads_beyond`: a step loads what lies in the cache beyond a row's position, and gives it no weight.
    """

    @property
    def reads_beyond(self) -> bool: ...

    def prefill(self, state: SlotState, parts: Sequence[PromptPart], *, plain: bool = False) -> None:
        """Put the keys and values of `parts` into their slots.

        `plain` leaves the slots' variants out.  Nothing but the cache changes.
        """

    def step(self, state: SlotState, *, bucket: int) -> None:
        """Read `token` of every slot, choose the next, append it; no living row passes `bucket` positions."""


class Portable:
    """Plain PyTorch on any device; with `compiled`, the step's blocks and its end are compiled.

    One function is compiled and called for every block with its weights as arguments, so the time to compile
    does not grow with the depth of the model.  A prefill is few large products of ever different shapes: of
    it only the low-rank terms are compiled, for any number of rows and tokens.
    """

    reads_beyond = True

    def __init__(
        self,
        decoder: Decoder,
        *,
        factors: Mapping[str, Factors],
        vectors: Mapping[int, Tensor],
        sampling: Sampling,
        compiled: bool,
    ) -> None:
        self._decoder = decoder
        self._factors, self._vectors = factors, vectors
        corrected = _of_any_length(forward.corrected) if compiled and factors else None
        self._deltas = forward.deltas_of(decoder, factors, vectors, corrected=corrected)
        self._plain = forward.deltas_of(decoder, {})
        self._sampling = sampling
        self._stream = uniform_key(sampling.seed, device=decoder.device) if compiled else None
        self._compiled = compiled
        self._run_block: Any = _static(forward.run_block) if compiled else forward.run_block
        self._end_step: Any = _static(self._append) if compiled else self._append

    def prefill(self, state: SlotState, parts: Sequence[PromptPart], *, plain: bool = False) -> None:
        for batch in batches(parts):
            self._prefill_batch(state, batch, plain=plain)

    def _prefill_batch(self, state: SlotState, batch: Sequence[PromptPart], *, plain: bool) -> None:
        device = self._decoder.device
        slots, tokens = pad_prompts(batch, device)
        longest = tokens.shape[1]
        steps = torch.arange(longest, device=device)[None]
        if not any(part.start for part in batch):
            positions = steps
            places = forward.fresh_places(self._decoder, slots=slots, num_tokens=longest)
        else:
            start = torch.tensor([[part.start] for part in batch], device=device)
            inside = steps < torch.tensor([[len(part.tokens)] for part in batch], device=device)
            positions = torch.where(inside, start + steps, 0)
            places = forward.cached_places(
                self._decoder,
                positions,
                slots=slots,
                write=torch.where(inside, start + steps, state.cache.num_positions - 1),
                bucket=bucket_of(max(part.start + len(part.tokens) for part in batch)),
            )
        x = forward.embed(self._decoder, tokens, positions)
        deltas = self._plain if plain else self._deltas
        with _compiling() if self._compiled else nullcontext():
            forward.run_blocks(self._decoder, x, state.cache, places, state.tables.take(slots), deltas)

    def step(self, state: SlotState, *, bucket: int) -> None:
        with _compiling() if self._compiled else nullcontext():
            self._step(state, bucket=bucket)

    def _step(self, state: SlotState, *, bucket: int) -> None:
        positions = state.position[:, None]
        places = forward.cached_places(self._decoder, positions, slots=None, write=positions, bucket=bucket)
        if self._compiled:
            _mark_bucket(places)
        x = forward.embed(self._decoder, state.token[:, None], positions)
        deltas = self._deltas
        if self._factors and not self._compiled and self._decoder.device.type == "cpu":
            group = forward.group_of(state.tables.index)
            deltas = forward.deltas_of(self._decoder, self._factors, self._vectors, group=group)
        x = forward.run_blocks(
            self._decoder, x, state.cache, places, state.tables, deltas, run=self._run_block
        )
        self._end_step(state, x[:, 0])

    def _append(self, state: SlotState, x: Tensor) -> None:
        logits = forward.logits_of(self._decoder, x)
        where = state.position + 1
        state.advance(pick(logits, self._sampling, keys=state.key, positions=where, stream=self._stream))


def _static(function: Callable[..., Any]) -> Any:
    """Compile for the shapes at hand.

    Left to itself, the compiler treats as variable what differs in a second model of the same process
    (widths, numbers of heads), and gives up on what follows.
    """
    return torch.compile(function, dynamic=False)


def _of_any_length(function: Callable[..., Any]) -> Any:
    """Compile `corrected` for any number of rows and tokens and for the widths at hand.

    With unknown widths the compiled code would divide by them and read one number at a time.
    """
    import torch._dynamo

    compiled = _static(function)

    def run(
        y: Tensor, x: Tensor, shrink: Tensor, expand: Tensor, index: Tensor, gain: Tensor, parts: int
    ) -> Any:
        for tensor, dims in ((y, (0, 1)), (x, (0, 1)), (index, (0,)), (gain, (0,))):
            torch._dynamo.maybe_mark_dynamic(tensor, dims)
        return compiled(y, x, shrink, expand, index, gain, parts)

    return run


def _mark_bucket(places: Sequence[forward.RowPlaces]) -> None:
    """Mark the one size that changes from step to step: all buckets share a compiled block."""
    import torch._dynamo

    for mask in {id(place.mask): place.mask for place in places}.values():
        if mask is not None:
            torch._dynamo.maybe_mark_dynamic(mask, 2)


@contextmanager
def _compiling() -> Iterator[None]:
    """Raise the compiler's limits for a block.

    Generators of other sizes in the same process share its code, so it needs room for more compiled forms;
    and by default the compiler writes a sum over many ranks to memory at the eighth tensor.
    """
    import torch._dynamo.config
    import torch._inductor.config

    reads = "realize_acc_reads_threshold"  # a limit that not every version of torch has
    limits = {reads: MOST_READS} if hasattr(torch._inductor.config, reads) else {}
    with (
        torch._dynamo.config.patch(recompile_limit=MAX_COMPILED),
        torch._inductor.config.patch(limits),
    ):
        yield


def batches(parts: Sequence[PromptPart]) -> list[list[PromptPart]]:
    """Batch parts with tokens by length, cut where padding would pass `PREFILL_TOKENS`."""
    found: list[list[PromptPart]] = []
    for part in sorted(filter(lambda part: part.tokens, parts), key=lambda part: len(part.tokens)):
        if found and (len(found[-1]) + 1) * len(part.tokens) <= PREFILL_TOKENS:
            found[-1].append(part)
        else:
            found.append([part])
    return found


def pad_prompts(batch: Sequence[PromptPart], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the slots [n] of a batch and its padded tokens [n, longest]."""
    longest = max(len(part.tokens) for part in batch)
    rows = [[*part.tokens, *[0] * (longest - len(part.tokens))] for part in batch]
    return torch.tensor([part.slot for part in batch], device=device), torch.tensor(rows, device=device)


class Graphed:
    """Another stepper whose step is captured once per bucket and replayed from then on.

    The graphs hold the addresses of one state and of the factors: change factors by writing into them.
    """

    def __init__(self, stepper: Stepper, state: SlotState, *, by_bucket: bool = True) -> None:
        self._stepper = stepper
        self.reads_beyond, self.prefill = stepper.reads_beyond, stepper.prefill
        self._by_bucket = by_bucket
        self._state = state
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def step(self, state: SlotState, *, bucket: int) -> None:
        assert state is self._state, "a captured step belongs to the state it was captured with"
        bucket = bucket if self._by_bucket else state.cache.num_positions
        with torch.cuda.device(state.token.device):
            if bucket not in self._graphs:
                self._graphs[bucket] = self._capture(bucket)
            self._graphs[bucket].replay()

    def _capture(self, bucket: int) -> torch.cuda.CUDAGraph:
        """Capture a step; warm-up steps run for real on a side stream, and their changes are undone."""
        saved = [(buffer, buffer.clone()) for buffer in self._state.changing()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._stepper.step(self._state, bucket=bucket)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._stepper.step(self._state, bucket=bucket)
        for buffer, before in saved:
            buffer.copy_(before)
        return graph


def choose_mode(mode: Mode, *, device: torch.device, obstacle: str | None = None) -> Decision[Mode]:
    """Choose how to run steps on `device`; `obstacle` says why the hand-written step cannot run."""
    if mode in ("graph", "fused") and device.type != "cuda":
        raise BadInput(
            f"mode {mode!r} needs a CUDA device; the model is on {device}", hint="take mode='auto'"
        )
    if mode == "fused" and obstacle is not None:
        raise BadInput(f"mode 'fused' cannot run this model: {obstacle}", hint="take mode='auto'")
    if mode != "auto":
        return Decision(value=mode, reason="asked for", source="assumed")
    if device.type != "cuda":
        return Decision(
            value="eager",
            reason="compiling takes seconds and a C++ compiler: a long run may repay mode='compiled'",
            source="assumed",
        )
    if obstacle is None:
        return Decision(
            value="fused",
            reason="kernels between the products apply the variants, and one graph replays the step",
            source="measured",
        )
    return Decision(
        value="graph", reason=f"compiled and replayed; no hand-written step: {obstacle}", source="assumed"
    )
