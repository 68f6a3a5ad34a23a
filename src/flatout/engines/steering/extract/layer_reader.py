"""One pass over a batch that reads every wanted layer and stops after the last of them.

A hook on each wanted block keeps the wanted positions, [B, D]; the hook of the last one ends the pass by
raising, so blocks above it, the final norm and the logits are never computed.

Attention is causal: a token sees nothing to its right.  So texts padded on the right need neither a mask nor
position ids, and the model takes its fastest attention.  Two answers to one prompt are computed from the
prompt's keys and values.  Prompts are padded on the left for that, where mask and position ids are needed:
a prompt and its answer then stand in neighbouring columns, as a sliding window counts them.

A model that is given neither mask nor cache searches its position ids for texts packed into one row, and
waits for the GPU to learn that there are none.  It does not look where there is a cache, so it is given one
that keeps nothing: the kernels of a batch are then launched while the batch before it runs.

Shapes: B rows, T columns, L wanted layers, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flatout.data import Pad, PadCollate
from flatout.data.rows.buffers import send
from flatout.engines.steering.extract.tokens import Tokens as TokenArray
from flatout.engines.steering.model_blocks import blocks_of, hidden_of, input_device
from flatout.ground.errors import import_extra

Tokens = TokenArray | Sequence[int]
Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Two sequences that start alike: the tokens they share, and how each continues."""

    prefix: Tokens
    endings: tuple[Tokens, Tokens]
    ranges: tuple[Range, Range]  # wanted tokens of each sequence; none lies in the prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """What to read of each row of a batch: one column, or the mean over a run of columns."""

    row: Tensor  # B
    first: Tensor  # B
    last: Tensor  # B
    single: bool

    @classmethod
    def of(
        cls, ranges: Sequence[tuple[int, int]], *, offsets: Sequence[int], device: torch.device
    ) -> Columns:
        """Take token ranges of texts whose first token stands at column `offset` of its row."""
        firsts = [first + offset for (first, _), offset in zip(ranges, offsets, strict=True)]
        lasts = [last + offset for (_, last), offset in zip(ranges, offsets, strict=True)]
        row, first, last = send(torch.tensor([range(len(firsts)), firsts, lasts]), device)
        single = all(last - first == 1 for first, last in ranges)
        return cls(row=row, first=first, last=last, single=single)

    def read(self, hidden_BTD: Tensor) -> Tensor:
        """Return the wanted positions, [B, D] in the type of the layer."""
        first_B, last_B = self.first.to(hidden_BTD.device), self.last.to(hidden_BTD.device)
        if self.single:
            return hidden_BTD[self.row.to(hidden_BTD.device), first_B]
        column_T = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
        wanted_BT = (column_T >= first_B[:, None]) & (column_T < last_B[:, None])
        # Chosen, not multiplied by 0: what padding holds may be not a number.
        kept_BTD = torch.where(wanted_BT[..., None], hidden_BTD, hidden_BTD.new_zeros(()))
        # In float32: a sum of bf16 values loses digits, one of fp16 overflows.
        total_BD = kept_BTD.sum(1, dtype=torch.float32)
        return (total_BD / (last_B - first_B)[:, None]).to(hidden_BTD.dtype)


class _Done(Exception):
    """Ends a pass after its last wanted block."""


class LayerReader:
    """Reads the residual stream of one model after the blocks `layers`."""

    def __init__(self, model: nn.Module, *, layers: Sequence[int]) -> None:
        self.model = model
        self.device = input_device(model)
        stack = blocks_of(model)
        self._blocks = [stack[layer] for layer in layers]

    def read(
        self,
        sequences: Sequence[Tokens],
        *,
        ranges: Sequence[Range],
        side: Literal["right", "left"] = "right",
    ) -> Tensor:
        """Return the wanted token range of each sequence at every layer, [B, L, D]."""
        batch = _Padded.of(sequences, side=side, device=self.device)
        columns = Columns.of(ranges, offsets=batch.offsets, device=self.device)
        forgetful: dict[str, Any] = {}
        if self.can_fork and type(self.model).__module__.startswith("transformers."):
            cache = self._cache()
            cache.update = _keep_nothing
            forgetful["past_key_values"] = cache
        return self._run(columns, use_cache=False, input_ids=batch.ids, **batch.placing, **forgetful)

    def read_forks(self, forks: Sequence[Fork]) -> Tensor:
        """Do the same for both sequences of every fork: [2 B, L, D], fork i at rows 2 i and 2 i + 1."""
        batch = _Padded.of([fork.prefix for fork in forks], side="left", device=self.device)
        cache = self._cache()
        self._run(None, use_cache=True, input_ids=batch.ids, past_key_values=cache, **batch.placing)
        cache.batch_repeat_interleave(2)
        endings = _Padded.of(
            [ending for fork in forks for ending in fork.endings], side="right", device=self.device
        )
        begun = [len(fork.prefix) for fork in forks for _ in fork.endings]
        ranges = [one for fork in forks for one in fork.ranges]
        columns = Columns.of(ranges, offsets=[-tokens for tokens in begun], device=self.device)
        position_BT = torch.tensor(begun)[:, None] + torch.arange(endings.ids.shape[1])
        prefix_BT = batch.placing["attention_mask"].repeat_interleave(2, dim=0)
        mask_BT = torch.cat([prefix_BT, torch.ones_like(endings.ids)], dim=1)
        return self._run(
            columns,
            use_cache=True,
            input_ids=endings.ids,
            past_key_values=cache,
            attention_mask=mask_BT,
            position_ids=send(position_BT, self.device),
        )

    @cached_property
    def can_fork(self) -> bool:
        """Whether the model continues from a cache of keys and values that can be repeated row by row."""
        parameters = inspect.signature(self.model.forward).parameters
        if not {"past_key_values", "position_ids", "attention_mask"} <= parameters.keys():
            return False
        caches = import_extra("transformers.cache_utils", extra="steering")
        plain = (caches.DynamicLayer, caches.DynamicSlidingWindowLayer)
        return all(type(layer) in plain for layer in self._cache().layers)

    def _cache(self) -> Any:
        """Make an empty cache for the model's layers."""
        return import_extra("transformers", extra="steering").DynamicCache(config=self.model.config)

    @torch.no_grad()
    def _run(self, columns: Columns | None, **inputs: Any) -> Tensor:
        """Run the blocks up to the last wanted one and stack what their hooks kept."""
        kept: dict[int, Tensor] = {}
        last = len(self._blocks) - 1

        def keep(place: int, output: Any) -> None:
            if columns is not None:
                kept[place] = columns.read(hidden_of(output))
            if place == last:
                raise _Done

        with ExitStack() as hooks:
            for place, block in enumerate(self._blocks):
                if columns is not None or place == last:
                    hooks.enter_context(
                        block.register_forward_hook(lambda _, __, output, place=place: keep(place, output))
                    )
            with suppress(_Done):
                self.model(**inputs)
        if columns is None:
            return torch.empty(0)
        # The blocks of a sharded model lie on several devices
        return torch.stack([kept[place].to(kept[last].device) for place in range(last + 1)], dim=1)


def _keep_nothing(keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Stand in for a cache's `update`: hand back the keys and values it was given."""
    return keys, values


@dataclass(frozen=True, kw_only=True, slots=True)
class _Padded:
    """Sequences padded into one batch."""

    ids: Tensor  # B T
    offsets: tuple[int, ...]  # the column of each sequence's first token
    placing: dict[str, Tensor]  # what tells the model which columns are text, and which token each of them is

    @classmethod
    def of(
        cls, sequences: Sequence[Tokens], *, side: Literal["right", "left"], device: torch.device
    ) -> _Padded:
        collate = PadCollate(default=Pad(side=side, mask=True))
        batch = collate([np.asarray(tokens, dtype=np.int64) for tokens in sequences])
        ids = send(batch.values, device)
        if side == "right":
            return cls(ids=ids, offsets=(0,) * len(ids), placing={})
        mask = send(batch.mask.long(), device)
        return cls(
            ids=ids,
            offsets=tuple(ids.shape[1] - len(tokens) for tokens in sequences),
            placing={"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)},
        )
