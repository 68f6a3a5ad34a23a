"""The static key-value cache: what every slot has seen, at fixed addresses.

A slot's text starts at position 0 and its keys and values lie at their positions, so nothing ever moves.
Attention never looks beyond a row's own position: the padding of a prefill is overwritten as the row
proceeds.  Where padding is loaded with weight 0 it must still be finite (0 times NaN is NaN): there a slot is
cleared before the next request takes it.

Shapes: L layers, K key-value heads, S positions, E head width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.ground.units import round_up

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.multiplex.models.decoder import Decoder

BUCKET = 64  # positions; attention reads a multiple of it, so few shapes exist


def bucket_of(num_positions: int) -> int:
    """Round a number of positions up to a whole bucket."""
    return round_up(num_positions, BUCKET)


@dataclass(frozen=True, slots=True)
class Cache:
    """`storage` is [L, 2, slots, K, S, E]; `keys(layer)` and `values(layer)` are views [slots, K, S, E].

    The last position of every slot belongs to no text: padding that has no other place is written there.
    """

    storage: Tensor

    @classmethod
    def empty(cls, decoder: Decoder, *, slots: int, max_tokens: int) -> Cache:
        """Make a cache for `slots` texts of at most `max_tokens` tokens."""
        import torch

        attention = decoder.blocks[0].attention
        shape = (
            len(decoder.blocks),
            2,
            slots,
            attention.num_kv_heads,
            bucket_of(max_tokens + 1),
            attention.head_width,
        )
        return cls(torch.zeros(shape, dtype=decoder.dtype, device=decoder.device))

    def keys(self, layer: int) -> Tensor:
        """Return the keys of one layer, [slots, K, S, E]."""
        return self.storage[layer, 0]

    def values(self, layer: int) -> Tensor:
        """Return the values of one layer, [slots, K, S, E]."""
        return self.storage[layer, 1]

    @property
    def num_positions(self) -> int:
        """S."""
        return self.storage.shape[4]

    def clear(self, slots: Sequence[int]) -> None:
        """Forget what `slots` have seen."""
        import torch

        if len(slots) == self.storage.shape[2]:
            self.storage.zero_()  # many times as fast as by index
        elif slots:
            self.storage.index_fill_(2, torch.tensor(slots, device=self.storage.device), 0)

    def take(self, slot: int, *, length: int) -> Tensor:
        """Copy the first `length` positions of a slot, [L, 2, K, length, E]."""
        return self.storage[:, :, slot, :, :length].clone()

    def put(self, slots: Tensor, prefix: Tensor) -> None:
        """Write what `take` returned to the beginning of `slots`."""
        self.storage[:, :, slots, :, : prefix.shape[3]] = prefix[:, :, None]


class Prefixes:
    """Prefixes computed once, by their tokens; beyond `max_tokens` the least recently used are dropped."""

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._held: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self.num_tokens = 0  # over all prefixes

    def __len__(self) -> int:
        return len(self._held)

    def find(self, tokens: tuple[int, ...]) -> Tensor | None:
        """Return what was kept for exactly these tokens."""
        found = self._held.get(tokens)
        if found is not None:
            self._held.move_to_end(tokens)
        return found

    def keep(self, tokens: tuple[int, ...], prefix: Tensor) -> None:
        """Hold a prefix, unless it alone is larger than the store."""
        if len(tokens) > self._max_tokens:
            return
        self.num_tokens += 0 if tokens in self._held else len(tokens)
        self._held[tokens] = prefix
        while self.num_tokens > self._max_tokens:
            dropped, _ = self._held.popitem(last=False)
            self.num_tokens -= len(dropped)

    def forget(self) -> None:
        """Drop every prefix: the weights have changed."""
        self._held.clear()
        self.num_tokens = 0
