"""The residual stream of many texts at many layers, from one pass over each distinct text.

    activations = extract(model, tokenizer, pairs, layers="all", position=-2)
    positive, negative = activations.halves()

The limit is a plain forward over the distinct tokens, cut after the last wanted layer.  Batches are filled by
a budget of tokens with texts of similar length together, the shortest first; the two answers of a pair share
the computation of their prompt where that saves more than a second, short pass costs.  While a GPU runs a
batch, the texts of the next are tokenised and the results of the previous are copied to the host.  A batch
that does not fit halves the budget, and finished results are kept.

Shapes: N texts, L wanted layers, D width.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from flatout.engines.run.fingerprint import model_fingerprint, tokenizer_fingerprint
from flatout.engines.steering.extract.async_copy import AsyncCopy, prioritise_launches
from flatout.engines.steering.extract.batches import BatchRunner, Work, forks_pay, plan_work
from flatout.engines.steering.extract.layer_reader import LayerReader
from flatout.engines.steering.extract.positions import Position, show_position, token_range
from flatout.engines.steering.extract.store import ActivationStore, Origin
from flatout.engines.steering.extract.tokens import Encoded, Tokens, encode_ahead
from flatout.engines.steering.model_blocks import blocks_of, chosen_layers, dtype_name, input_device, width_of
from flatout.engines.steering.questions import Question
from flatout.ground import OnCount, ignore
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GPU_BATCH_TOKENS, MOST_GPU_BATCH_TOKENS = 4096, 65536
GPU_BATCH_WORK = 8 * 10**12  # tokens times parameters: some 40 ms of a large GPU, twice what launching takes
CPU_BATCH_TOKENS = 256
WINDOW_CHARACTERS = 2  # for every token of a batch: about half a batch is tokenised at a time
BATCH_BYTES = 32 << 20  # of values: nothing runs while the values of the last batch are copied
SHARD_BYTES = 32 << 20  # rows wait in memory for the store until they are worth a file,
SHARD_S = 30.0  # or until a kill would cost this much work


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Values [N, L, D] of texts; of pairs, all positive texts and then all negative ones.

    They are of the type that the model's layers give: bfloat16 of a model in bfloat16.
    """

    values: Tensor
    layers: tuple[int, ...]
    keys: tuple[str, ...]
    recipe: Mapping[str, str] = field(default_factory=dict)
    origin: Origin | None = None  # under which a store keeps them
    num_read: int = 0  # of the distinct texts, those that came from a store

    def halves(self) -> tuple[Activations, Activations]:
        """Split the texts of pairs into positive and negative ones, row i of each from pair i."""
        half, odd = divmod(len(self.keys), 2)
        if odd:
            raise BadInput(
                f"{len(self.keys)} texts cannot be halved into pairs",
                hint="extract pairs of texts, or use the activations as they are",
            )
        return self.rows(0, half), self.rows(half, 2 * half)

    def rows(self, first: int, last: int) -> Activations:
        """Return texts `first` to `last`, without copying them."""
        return Activations(
            values=self.values[first:last],
            layers=self.layers,
            keys=self.keys[first:last],
            recipe=self.recipe,
            origin=self.origin,
        )


def extract(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] | Sequence[Question] | Encoded,
    *,
    layers: Literal["all"] | Sequence[int] = "all",
    position: Position = "last",
    batch_tokens: int | None = None,
    store: ActivationStore | None = None,
    on_count: OnCount = ignore,
) -> Activations:
    """Extract activations of texts, or of both answers of questions, after blocks `layers` at `position`.

    `texts` may be tokenised before, by `encode`.  `on_count(done, total)` counts texts.  With a `store`,
    texts that it has are not computed and what is computed is kept there.
    """
    if model.training:
        raise BadInput(
            "the model is in training mode, where dropout changes activations", hint="model.eval()"
        )
    chosen = chosen_layers(layers, num_layers=len(blocks_of(model)))
    budget = choose_batch_tokens(batch_tokens, model)
    reader = LayerReader(model, layers=chosen)
    on_gpu = reader.device.type == "cuda"
    origin = None if store is None else _origin(model, tokenizer, position)
    writer = None
    if store is not None and origin is not None:
        writer = _StoreWriter(store, origin, layers=chosen)
    sides = 2 if texts and not isinstance(texts, Encoded) and isinstance(texts[0], Question) else 1
    values = _Collector(
        num_given=texts.num_given if isinstance(texts, Encoded) else len(texts),
        num_sides=texts.num_sides if isinstance(texts, Encoded) else sides,
        writer=writer,
        on_count=on_count,
    )
    shared: list[Decision[bool]] = []
    num_weights = _num_weights(model)

    def plan_windows() -> Iterator[list[Work]]:
        if isinstance(texts, Encoded):
            windows = texts.windows(budget.value // 2 if on_gpu else None)
        else:
            window = WINDOW_CHARACTERS * budget.value if on_gpu else None
            windows = encode_ahead(texts, tokenizer=tokenizer, window_characters=window)
        for places, encoded in windows:
            missing, pairs = values.expect(places, encoded, position=position)
            plan = partial(plan_work, missing, sequences=values.sequences, ranges=values.ranges)
            work = plan(pairs=pairs)
            decision = forks_pay(
                work,
                batch_tokens=budget.value,
                device=reader.device,
                num_weights=num_weights,
                able=lambda: reader.can_fork,
            )
            shared.append(decision)
            yield work if decision.value or not pairs else plan(pairs=())

    row_bytes = len(chosen) * width_of(model) * next(model.parameters()).element_size()
    max_rows = max(1, BATCH_BYTES // row_bytes) if on_gpu else None
    try:
        with prioritise_launches() if on_gpu else nullcontext(), AsyncCopy(values.fill) as copies:
            runner = BatchRunner(reader, batch_tokens=budget.value, on_values=copies.take, max_rows=max_rows)
            runner.run(plan_windows())
    finally:  # an interrupt or an error keeps what was computed before it
        if writer is not None:
            writer.flush()
    return Activations(
        values=values.values,
        layers=chosen,
        keys=tuple(values.keys),
        origin=origin,
        num_read=values.num_read,
        recipe={
            "position": show_position(position),
            "dtype": dtype_name(model),
            "model": type(model).__name__,
            **({} if origin is None else {"weights": origin.weights}),
            "batch_tokens": str(budget.value),
            "shared_prompts": _show_shared(shared),
        },
    )


def _show_shared(shared: Sequence[Decision[bool]]) -> str:
    """Say what was decided, window by window, with the reason of the first that shares."""
    first = max(shared, key=lambda decision: decision.value)
    if len(shared) == 1:
        return str(first)
    return f"{first}; so in {sum(one.value for one in shared)} of {len(shared)} windows"


def choose_batch_tokens(batch_tokens: int | None, model: nn.Module) -> Decision[int]:
    """Take what was asked for, or enough tokens to keep the device busy while the host prepares."""
    if batch_tokens is not None:
        if batch_tokens < 1:
            raise BadInput(f"batch_tokens={batch_tokens} is below 1")
        return Decision(value=batch_tokens, reason="asked for", source="assumed")
    if input_device(model).type == "cpu":
        reason = "more tokens only pad more: a CPU is busy with these"
        return Decision(value=CPU_BATCH_TOKENS, reason=reason, source="measured")
    wanted = GPU_BATCH_WORK // max(_num_weights(model), 1)
    return Decision(
        value=min(max(wanted, GPU_BATCH_TOKENS), MOST_GPU_BATCH_TOKENS),
        reason="a batch takes a GPU longer than the host takes to launch it; halved where memory is short",
        source="assumed",
    )


class _Collector:
    """Collects values sequence by sequence; sequences are numbered as they come."""

    def __init__(
        self,
        *,
        num_given: int,
        num_sides: int,
        writer: _StoreWriter | None,
        on_count: OnCount,
    ) -> None:
        self._sides, self._num_given = num_sides, num_given
        self.values = torch.empty(0)  # until the first are there, which have a shape and a type
        self._views: tuple[Tensor, ...] = ()
        self.keys = [""] * (num_sides * num_given)
        self.sequences: list[Tokens] = []
        self.ranges: list[tuple[int, int]] = []
        self._rows: list[list[int]] = []  # of `values`, for each sequence
        self._writer, self._on_count, self._num_done = writer, on_count, 0
        self.num_read = 0
        self._placing = threading.Lock()

    def expect(
        self, places: Sequence[int], encoded: Encoded, *, position: Position
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Take in some texts; return the numbers of sequences to compute, and the pairs among all."""
        begun = len(self.sequences)
        self.sequences += encoded.sequences
        self._rows += [[] for _ in encoded.sequences]
        self.ranges += [
            token_range(position, num_tokens=len(tokens), text=text)
            for tokens, text in zip(encoded.sequences, encoded.texts, strict=True)
        ]
        rows = [place + side * self._num_given for side in range(self._sides) for place in places]
        for row, number in zip(rows, encoded.row_of, strict=True):
            self.keys[row] = encoded.keys[number].hex()
            self._rows[begun + number].append(row)
        missing = dict.fromkeys(range(begun, len(self.sequences)))
        if self._writer is not None:
            known, values = self._writer.find(encoded.keys, begun=begun)
            self._place(known, values)
            self.num_read += len(known)
            for number in known:
                del missing[number]
        return list(missing), [(begun + first, begun + second) for first, second in encoded.pairs]

    def fill(self, sequences: Sequence[int], values: Tensor) -> None:
        """Take in values [sequences, L, D] that were computed."""
        if self._writer is not None:
            self._writer.add(sequences, values)
        self._place(sequences, values)

    def _place(self, sequences: Sequence[int], values: Tensor) -> None:
        if not sequences:
            return
        with self._placing:  # what a store has is placed by another thread than what was computed
            if not self._views:
                self.values = torch.empty(len(self.keys), *values.shape[1:], dtype=values.dtype)
                self._views = self.values.unbind()
            taken = zip(sequences, values.unbind(), strict=True)
            pairs = [(self._views[row], value) for number, value in taken for row in self._rows[number]]
            # Row by row: an indexed assignment takes several times as long.
            torch._foreach_copy_([view for view, _ in pairs], [value for _, value in pairs])
            self._num_done += len(pairs)
            self._on_count(self._num_done, len(self.keys))


class _StoreWriter:
    """Gathers rows for a store until they are worth a file."""

    def __init__(self, store: ActivationStore, origin: Origin, *, layers: Sequence[int]) -> None:
        self._store, self._origin, self._layers = store, origin, layers
        self._keys: list[bytes] = []
        self._waiting: list[tuple[Sequence[int], Tensor]] = []
        self._flushed_at = time.monotonic()
        self._failed = False

    def find(self, keys: Sequence[bytes], *, begun: int) -> tuple[list[int], Tensor]:
        """Return which of the sequences, numbered from `begun`, the store has, and their values."""
        self._keys += keys
        found = self._store.read(self._origin, keys=keys, layers=self._layers)
        return [begun + place for place in found.places], found.values

    def add(self, sequences: Sequence[int], values: Tensor) -> None:
        self._waiting.append((sequences, values))
        num_bytes = sum(waiting.nbytes for _, waiting in self._waiting)
        if num_bytes >= SHARD_BYTES or time.monotonic() - self._flushed_at >= SHARD_S:
            self.flush()

    def flush(self) -> None:
        """Write what is pending; if the store has no room, extraction continues without it."""
        waiting, self._waiting = self._waiting, []
        self._flushed_at = time.monotonic()
        if not waiting or self._failed:
            return
        keys = [self._keys[sequence] for sequences, _ in waiting for sequence in sequences]
        # Layer by layer, as a shard holds them: the store need not copy them once more.
        values_LND = torch.cat([values.transpose(0, 1) for _, values in waiting], dim=1)
        try:
            self._store.put(self._origin, keys=keys, layers=self._layers, values=values_LND.transpose(0, 1))
        except BadInput as error:
            self._failed = True
            warnings.warn(
                f"activations are not stored: {error.message}. The extraction goes on and returns all of"
                f" them, but the next one computes them again. {error.hint or ''}".strip(),
                RuntimeWarning,
                stacklevel=2,
            )


def _origin(model: nn.Module, tokenizer: PreTrainedTokenizerBase, position: Position) -> Origin:
    with ThreadPoolExecutor(max_workers=1) as thread:
        weights = thread.submit(model_fingerprint, model)
        tokenizer_name = tokenizer_fingerprint(tokenizer)
    return Origin(
        weights=weights.result(),
        tokenizer=tokenizer_name,
        position=show_position(position),
        dtype=dtype_name(model),
    )


def _num_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
