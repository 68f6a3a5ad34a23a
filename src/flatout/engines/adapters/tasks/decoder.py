"""A small transformer that writes text from an encoder's states, shared by every task that writes.

An encoder gives one state per token of the input and cannot write.  This decoder reads the tokens written so
far and, by cross-attention, the encoder's states of the input, and predicts the next token.  Most parameters
of such a model are its vocabulary; here the encoder's own frozen word embeddings serve as input and output,
so the decoder trains a few layers only.  A task adds its own first vector, which says what to write, and its
own bias over the vocabulary.

In training all places of a text are computed at once.  `generate` computes one token at a time and caches
keys and values.

Legend: B rows, T target tokens, L input tokens, H width, N heads, D width of a head, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.engines.adapters.lora.chunked_loss import chunked_argmax
from flatout.ground.errors import BadInput

HEAD_WIDTH = 64
KeysValues = tuple[Tensor, Tensor]  # [B, N, L, D] each


def heads_for(width: int) -> int:
    """Return how many heads of about 64 numbers divide the width."""
    wanted = max(1, width // HEAD_WIDTH)
    return next(heads for heads in range(wanted, 0, -1) if width % heads == 0)


class CachedAttention(nn.Module):
    """Multi-head attention whose keys and values are computed apart, so that they can be cached."""

    def __init__(self, width: int, *, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def keys_values(self, x_BLH: Tensor) -> KeysValues:
        keys, values = self.key_value(x_BLH).chunk(2, dim=-1)
        return self._split(keys), self._split(values)

    def forward(
        self,
        x_BTH: Tensor,
        keys_BNLD: Tensor,
        values_BNLD: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        mixed_BNTD = F.scaled_dot_product_attention(
            self._split(self.query(x_BTH)),
            keys_BNLD,
            values_BNLD,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        mixed: Tensor = self.output(mixed_BNTD.transpose(1, 2).flatten(2))
        return mixed

    def _split(self, x_BLH: Tensor) -> Tensor:
        heads_BLND: Tensor = x_BLH.unflatten(-1, (self.num_heads, -1))
        return heads_BLND.transpose(1, 2)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention and a feed-forward part, each normalised before and added after."""

    def __init__(self, width: int, *, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.self_norm, self.cross_norm, self.wide_norm = (nn.LayerNorm(width) for _ in range(3))
        self.self_attention = CachedAttention(width, num_heads=num_heads, dropout=dropout)
        self.cross_attention = CachedAttention(width, num_heads=num_heads, dropout=dropout)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTH: Tensor, source: KeysValues, *, mask: Tensor) -> Tensor:
        """Compute all places of a text at once; each sees the places before it."""
        normed = self.self_norm(x_BTH)
        keys, values = self.self_attention.keys_values(normed)
        x_BTH = x_BTH + self.dropout(self.self_attention(normed, keys, values, causal=True))
        return self._rest(x_BTH, source, mask=mask)

    def step(
        self, x_B1H: Tensor, source: KeysValues, written: KeysValues, *, place: int, mask: Tensor
    ) -> Tensor:
        """Compute one place from the keys and values of the places before it."""
        normed = self.self_norm(x_B1H)
        key, value = self.self_attention.keys_values(normed)
        keys, values = written
        keys[:, :, place : place + 1], values[:, :, place : place + 1] = key, value
        mixed = self.self_attention(normed, keys[:, :, : place + 1], values[:, :, : place + 1])
        return self._rest(x_B1H + self.dropout(mixed), source, mask=mask)

    def _rest(self, x: Tensor, source: KeysValues, *, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.cross_attention(self.cross_norm(x), *source, mask=mask))
        widened: Tensor = self.dropout(self.wide(self.wide_norm(x)))
        return x + widened


class TextDecoder(nn.Module):
    """Writes with the words of `embedding_VH`, which stay frozen and are not parameters of this module."""

    embedding: Tensor

    def __init__(
        self,
        embedding_VH: Tensor,
        *,
        end_id: int,
        pad_id: int,
        num_layers: int = 2,
        num_heads: int | None = None,
        max_length: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        width = embedding_VH.shape[1]
        num_heads = num_heads or heads_for(width)
        if width % num_heads:
            raise BadInput(f"num_heads={num_heads} does not divide the width {width}")
        self.width, self.max_length = width, max_length
        self.end_id, self.pad_id = end_id, pad_id
        self.register_buffer("embedding", embedding_VH.detach(), persistent=False)
        self.read = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        self.places = nn.Embedding(max_length, width)
        self.source_norm = nn.LayerNorm(width)
        self.layers: list[DecoderLayer] = nn.ModuleList(  # type: ignore[assignment]  # a list that registers
            [DecoderLayer(width, num_heads=num_heads, dropout=dropout) for _ in range(num_layers)]
        )
        self.say = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, start_H: Tensor, ids_BT: Tensor, states_BLH: Tensor, lengths_B: Tensor) -> Tensor:
        """Return [B, T, H]: place t predicts token t from the tokens before it."""
        length = ids_BT.shape[1]
        if length > self.max_length:
            raise BadInput(f"a target of {length} tokens is longer than the decoder's {self.max_length}")
        before_BTH = self._embedded(ids_BT[:, :-1])
        x = torch.cat([start_H.expand(len(ids_BT), 1, -1).to(before_BTH.dtype), before_BTH], dim=1)
        x = self.dropout(x + self.places.weight[:length])
        source, mask = self._source(states_BLH), source_mask(states_BLH, lengths_B)
        for layer in self.layers:
            x = layer(x, layer.cross_attention.keys_values(source), mask=mask)
        said: Tensor = self.say(x)
        return said

    @torch.no_grad()
    def generate(
        self,
        start_H: Tensor,
        states_BLH: Tensor,
        lengths_B: Tensor,
        *,
        max_new_tokens: int,
        bias_V: Tensor | None = None,
    ) -> Tensor:
        """Return [B, T]: the most likely token each time, up to the end token, then padding.

        A row is written as it would be alone: rows of a batch do not see each other.
        """
        max_new_tokens = min(max_new_tokens, self.max_length)
        source, mask = self._source(states_BLH), source_mask(states_BLH, lengths_B)
        sources = [layer.cross_attention.keys_values(source) for layer in self.layers]
        written = [self._empty(keys, max_new_tokens) for keys, _ in sources]
        ids_BT = torch.full((len(states_BLH), max_new_tokens), self.pad_id, device=states_BLH.device)
        ended_B = torch.zeros(len(states_BLH), dtype=torch.bool, device=states_BLH.device)
        x_B1H = start_H.expand(len(states_BLH), 1, -1)
        for place in range(max_new_tokens):
            x_B1H = x_B1H + self.places.weight[place]
            for layer, kept, of_source in zip(self.layers, written, sources, strict=True):
                x_B1H = layer.step(x_B1H, of_source, kept, place=place, mask=mask)
            token_B = chunked_argmax(self.say(x_B1H).squeeze(1), self.embedding, bias_V=bias_V)
            ended_B = ended_B | (token_B == self.end_id)
            ids_BT[:, place] = token_B.where(~ended_B, self.pad_id)
            if bool(ended_B.all()):
                return ids_BT[:, :place]
            x_B1H = self._embedded(token_B.unsqueeze(1))
        return ids_BT

    def _embedded(self, ids: Tensor) -> Tensor:
        words = F.embedding(ids, self.embedding)
        read: Tensor = self.read(words.to(self.places.weight.dtype))
        return read

    def _source(self, states_BLH: Tensor) -> Tensor:
        normed: Tensor = self.source_norm(states_BLH.to(self.places.weight.dtype))
        return normed

    def _empty(self, keys_BNLD: Tensor, length: int) -> KeysValues:
        rows, heads, _, width = keys_BNLD.shape
        shape = (rows, heads, length, width)
        return keys_BNLD.new_empty(shape), keys_BNLD.new_empty(shape)


def source_mask(states_BLH: Tensor, lengths_B: Tensor) -> Tensor:
    """Return [B, 1, 1, L], True at real tokens of the input."""
    places = torch.arange(states_BLH.shape[1], device=states_BLH.device)
    return (places < lengths_B.unsqueeze(1))[:, None, None]
