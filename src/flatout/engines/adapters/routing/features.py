"""What the router sees of a text: means of its states under the frozen encoder, computed once and kept.

The last states say what a text is about; the words themselves and the first layers say how it is written (a
docstring, a line of a menu).  So the means are taken at four depths, from the words alone to the last layer;
benchmarks/LOG.md says what that is worth.

No adapter changes these states, so they are the same in every epoch: training the router for E epochs on
stored features costs one pass of the encoder instead of E.  A file is named by the encoder's weights and
every token, so that a changed model or row never gets an old feature.

    N rows   H width of a feature: DEPTHS times that of the encoder
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flatout.data import TokenBudgetBatches
from flatout.engines.adapters.lora.encoder import PackedEncoder, pool_rows
from flatout.engines.adapters.lora.token_blocks import block_of
from flatout.engines.run.tensor_files import load_tensors, save_tensors
from flatout.ground.atomic_files import remove_leftovers
from flatout.ground.errors import BadInput
from flatout.ground.units import round_up

if TYPE_CHECKING:
    from flatout.engines.adapters.tasks.task import Example
    from flatout.engines.run.ranks import Ranks

NAME = "features"
LENGTH_MULTIPLE = 8
DEPTHS = 4


def width_of(encoder: PackedEncoder) -> int:
    """Return the width of one row's feature."""
    return DEPTHS * encoder.width


def depths_of(num_states: int) -> list[int]:
    """Return which of an encoder's states the router sees: 0 is its words, then one after each layer."""
    return [round(place * (num_states - 1) / (DEPTHS - 1)) for place in range(DEPTHS)]


def features_of(
    encoder: PackedEncoder,
    examples: Sequence[Example],
    *,
    pad_id: int,
    fingerprint: str,
    folder: Path | None = None,
    tokens: int = 8192,
    ranks: Ranks | None = None,
) -> Tensor:
    """Return features [N, H], float32 on the host, row i of example i; read from `folder` if kept there.

    `fingerprint` names the encoder's weights.  Only one batch's states are held at a time.  Several `ranks`
    compute a share of the batches each, and the first keeps them.
    """
    if not examples:
        return torch.zeros(0, width_of(encoder))
    path = None if folder is None else folder / f"{NAME}-{key_of(examples, fingerprint)}.safetensors"
    kept = None if path is None else _read(path, len(examples))
    together = None
    if ranks is not None and ranks.num_ranks > 1 and ranks.texts("" if kept is None else "kept")[0] == "":
        together, kept = ranks, None  # the first rank has none, so all compute
    if kept is not None:
        return kept
    rows_NH = _compute(encoder, examples, pad_id=pad_id, tokens=tokens, ranks=together)
    if path is not None and (ranks is None or ranks.first):
        remove_leftovers(path.parent, of=NAME)
        save_tensors(path, {NAME: rows_NH}, extra="adapters")
    return rows_NH


def key_of(examples: Sequence[Example], fingerprint: str) -> str:
    """Name features by the encoder's weights and every token, in their order."""
    digest = hashlib.blake2b(f"{DEPTHS} {fingerprint}".encode(), digest_size=12)
    for example in examples:
        digest.update(f"|{len(example.ids)}:".encode())
        digest.update(np.ascontiguousarray(example.ids, dtype=np.int32).tobytes())
        if example.types is not None:
            digest.update(b"types")
            digest.update(np.ascontiguousarray(example.types, dtype=np.int32).tobytes())
    return digest.hexdigest()


def by_length(examples: Sequence[Example], *, tokens: int, spread: float = 0.05) -> Iterator[list[int]]:
    """Yield examples, by number, in batches of similar length and at most `tokens` padded tokens.

    The first batch is the largest: if it fits into memory, all do.  `spread` is how far, as a share, lengths
    within a batch may differ.
    """
    if not examples:
        return
    lengths = [round_up(len(example.ids), LENGTH_MULTIPLE) for example in examples]
    yield from TokenBudgetBatches(
        lengths, tokens=tokens, too_long="alone", shuffle=False, spread=spread, rank=0, num_ranks=1
    )


def _compute(
    encoder: PackedEncoder, examples: Sequence[Example], *, pad_id: int, tokens: int, ranks: Ranks | None
) -> Tensor:
    rows_NH = torch.zeros(len(examples), width_of(encoder))
    batches = list(by_length(examples, tokens=tokens))
    for numbers in batches if ranks is None else [batches[each] for each in ranks.own(range(len(batches)))]:
        chosen = [examples[number] for number in numbers]
        block = block_of(
            [example.ids for example in chosen],
            types=[example.types for example in chosen],
            adapter=0,
            pad_id=pad_id,
            length_multiple=LENGTH_MULTIPLE,
            device=encoder.device,
        )
        with torch.no_grad():
            states = encoder.depths(block)
            chosen_depths = [states[place] for place in depths_of(len(states))]
            means = [pool_rows(states_BLH.float(), block.lengths) for states_BLH in chosen_depths]
            rows_NH[numbers] = torch.cat(means, dim=-1).cpu()
    return rows_NH if ranks is None else ranks.gather(rows_NH, what="features")


def _read(path: Path, num_rows: int) -> Tensor | None:
    if not path.exists():
        return None
    hint = "remove it; it is computed again"
    kept = load_tensors(path, extra="adapters", hint=hint).get(NAME, torch.empty(0))
    if len(kept) != num_rows:
        raise BadInput(f"{path} holds {len(kept)} rows, {num_rows} are expected", hint=hint)
    return kept
