"""The residual stream of many texts at many layers, from one pass over each distinct text.

    activations = extract(model, tokenizer, pairs, layers="all", position=-2)
    positive, negative = activations.halves()

The limit is a plain forward over the distinct tokens, cut after the last wanted layer.  Batches are filled by
a budget of tokens with texts of similar length together, the longest first; the two answers of a pair share
the computation of their prompt where that saves more than a second, short pass costs; results travel to the
host while the next batch runs.  A batch that does not fit halves the budget, and what is done stays done.

Shapes: N texts, L wanted layers, D width.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from flatout.decisions import Decision
from flatout.engines.steering.blocks import blocks_of, chosen_layers, input_device, width_of
from flatout.engines.steering.fingerprints import model_fingerprint, tokenizer_fingerprint
from flatout.engines.steering.landing import Landing
from flatout.engines.steering.passes import Reader
from flatout.engines.steering.positions import Position, name_of, token_range
from flatout.engines.steering.questions import Pair
from flatout.engines.steering.store import Space, Store
from flatout.engines.steering.texts import Encoded, encode
from flatout.engines.steering.work import forks_pay, planned, run_batches
from flatout.errors import BadInput, import_extra
from flatout.whole_files import remove_leftovers, write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "flatout-extraction"
VERSION = "1"
GPU_BATCH_TOKENS, MOST_GPU_BATCH_TOKENS = 16384, 65536
GPU_BATCH_WORK = 8 * 10**12  # tokens times parameters: some 40 ms of a large GPU, twice what launching takes
CPU_BATCH_TOKENS = 256
SHARD_BYTES = 32 << 20  # rows wait in memory for the store until they are worth a file,
SHARD_S = 30.0  # or until a kill would cost this much work


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Values [N, L, D] of texts; of pairs, all positive texts and then all negative ones."""

    values: Tensor
    layers: tuple[int, ...]
    keys: tuple[str, ...]
    recipe: Mapping[str, str] = field(default_factory=dict)

    def halves(self) -> tuple[Activations, Activations]:
        """The positive and the negative texts of pairs, row i of each from pair i."""
        half, odd = divmod(len(self.keys), 2)
        if odd:
            raise BadInput(f"{len(self.keys)} texts are no pairs")
        return self.rows(0, half), self.rows(half, 2 * half)

    def rows(self, first: int, last: int) -> Activations:
        """Texts `first` to `last`, without copying them."""
        return Activations(
            values=self.values[first:last],
            layers=self.layers,
            keys=self.keys[first:last],
            recipe=self.recipe,
        )

    def save(self, path: Path | str) -> None:
        """Write a safetensors file, whole or not at all."""
        path = Path(path)
        save: Any = import_extra("safetensors.torch", extra="steering").save
        said = {"layers": list(self.layers), "keys": list(self.keys), "recipe": dict(self.recipe)}
        metadata = {"format": FORMAT, "version": VERSION, "content": json.dumps(said)}
        content = save({"values": self.values.cpu().contiguous()}, metadata=metadata)
        remove_leftovers(path.parent, of=path.name)
        write_whole(path, content)


def load(path: Path | str) -> Activations:
    """Activations that `save` wrote, memory-mapped: rows are read from the disk when they are used."""
    safetensors: Any = import_extra("safetensors", extra="steering")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
                raise BadInput(f"{path} holds no activations of version {VERSION} of flatout's format")
            values, said = file.get_tensor("values"), json.loads(metadata["content"])
    except (OSError, safetensors.SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"{path} cannot be read: {reason}") from error
    return Activations(
        values=values, layers=tuple(said["layers"]), keys=tuple(said["keys"]), recipe=said["recipe"]
    )


def extract(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] | Sequence[Pair],
    *,
    layers: Literal["all"] | Sequence[int] = "all",
    position: Position = "last",
    batch_tokens: int | None = None,
    store: Store | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Activations:
    """Activations of texts or pairs after the blocks `layers`, read at `position`.

    `on_progress(done, total)` counts distinct texts.  With a `store`, texts that it has are not computed and
    what is computed is kept there.
    """
    if model.training:
        raise BadInput(
            "the model is in training mode, where dropout changes activations", hint="model.eval()"
        )
    chosen = chosen_layers(layers, num_layers=len(blocks_of(model)))
    encoded = encode(texts, tokenizer=tokenizer)
    keys = encoded.keys()
    budget = budget_of(batch_tokens, model)
    ranges = [
        token_range(position, num_tokens=len(tokens), text=text)
        for tokens, text in zip(encoded.sequences, encoded.texts, strict=True)
    ]
    result = _Result(encoded, num_layers=len(chosen), width=width_of(model), on_progress=on_progress)
    keep = None
    if store is not None:
        keep = _Keeping(store, _space(model, tokenizer, position), keys=keys, layers=chosen)
        result.fill(*keep.found())
        result.keeping = keep
    reader = Reader(model, layers=chosen)
    missing = result.missing()
    work = planned(missing, sequences=encoded.sequences, ranges=ranges, pairs=encoded.pairs)
    shared = forks_pay(work, batch_tokens=budget.value, device=reader.device, able=reader.can_fork)
    if not shared.value:
        work = planned(missing, sequences=encoded.sequences, ranges=ranges, pairs=())
    try:
        with Landing(result.fill) as landing:
            run_batches(reader, work, batch_tokens=budget.value, on_values=landing.take)
    finally:  # an interrupt or an error keeps what was computed before it
        if keep is not None:
            keep.flush()
    return Activations(
        values=result.values,
        layers=chosen,
        keys=tuple(keys[row].hex() for row in encoded.row_of),
        recipe={
            "position": name_of(position),
            "dtype": _dtype_name(model),
            "model": type(model).__name__,
            "batch_tokens": str(budget.value),
            "shared_prompts": str(shared),
        },
    )


def budget_of(batch_tokens: int | None, model: nn.Module) -> Decision[int]:
    """Tokens of a batch: what was asked for, or enough to keep the device busy while the host prepares."""
    if batch_tokens is not None:
        if batch_tokens < 1:
            raise BadInput(f"batch_tokens={batch_tokens} is below 1")
        return Decision(value=batch_tokens, reason="asked for", source="assumed")
    if input_device(model).type == "cpu":
        reason = "more tokens only pad more: a CPU is busy with these"
        return Decision(value=CPU_BATCH_TOKENS, reason=reason, source="measured")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    wanted = GPU_BATCH_WORK // max(parameters, 1)
    return Decision(
        value=min(max(wanted, GPU_BATCH_TOKENS), MOST_GPU_BATCH_TOKENS),
        reason="a batch takes a GPU longer than the host takes to launch it; halved where memory is short",
        source="assumed",
    )


class _Result:
    """Values of the texts, filled sequence by sequence."""

    def __init__(
        self, encoded: Encoded, *, num_layers: int, width: int, on_progress: Callable[[int, int], None]
    ) -> None:
        self.values = torch.empty(len(encoded.row_of), num_layers, width)
        self.keeping: _Keeping | None = None
        self._on_progress = on_progress
        self._texts: list[list[int]] = [[] for _ in encoded.sequences]
        for text, sequence in enumerate(encoded.row_of):
            self._texts[sequence].append(text)
        self._done = [False] * len(encoded.sequences)

    def missing(self) -> list[int]:
        """Sequences without values."""
        return [sequence for sequence, done in enumerate(self._done) if not done]

    def fill(self, sequences: Sequence[int], values: Tensor) -> None:
        """Values [sequences, L, D] of some sequences, for every text that has them."""
        if not sequences:
            return
        repeats = torch.tensor([len(self._texts[sequence]) for sequence in sequences])
        texts = list(chain.from_iterable(self._texts[sequence] for sequence in sequences))
        self.values[texts] = values.repeat_interleave(repeats, dim=0).float()
        for sequence in sequences:
            self._done[sequence] = True
        if self.keeping is not None:
            self.keeping.add(sequences, values)
        self._on_progress(sum(self._done), len(self._done))


class _Keeping:
    """Rows on their way into a store, gathered until they are worth a file."""

    def __init__(self, store: Store, space: Space, *, keys: Sequence[bytes], layers: Sequence[int]) -> None:
        self._store, self._space = store, space
        self._keys, self._layers = keys, layers
        self._waiting: list[tuple[Sequence[int], Tensor]] = []
        self._flushed_at = time.monotonic()
        self._failed = False

    def found(self) -> tuple[Sequence[int], Tensor]:
        """Sequences that the store has, and their values."""
        found = self._store.read(self._space, keys=self._keys, layers=self._layers)
        return found.places, found.values

    def add(self, sequences: Sequence[int], values: Tensor) -> None:
        self._waiting.append((sequences, values))
        num_bytes = sum(waiting.nbytes for _, waiting in self._waiting)
        if num_bytes >= SHARD_BYTES or time.monotonic() - self._flushed_at >= SHARD_S:
            self.flush()

    def flush(self) -> None:
        """Write what waits; where there is no room the extraction goes on without the store."""
        waiting, self._waiting = self._waiting, []
        self._flushed_at = time.monotonic()
        if not waiting or self._failed:
            return
        keys = [self._keys[sequence] for sequences, _ in waiting for sequence in sequences]
        values = torch.cat([values for _, values in waiting])
        try:
            self._store.put(self._space, keys=keys, layers=self._layers, values=values)
        except BadInput as error:
            self._failed = True
            warnings.warn(
                f"activations are not stored: {error.message}. The extraction goes on and returns all of"
                f" them, but the next one computes them again. {error.hint or ''}".strip(),
                RuntimeWarning,
                stacklevel=2,
            )


def _space(model: nn.Module, tokenizer: PreTrainedTokenizerBase, position: Position) -> Space:
    return Space(
        weights=model_fingerprint(model),
        tokenizer=tokenizer_fingerprint(tokenizer),
        position=name_of(position),
        dtype=_dtype_name(model),
    )


def _dtype_name(model: nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")
