"""One forward for every family: rows that stand at different positions and run different variants.

Two ways to attend.  A *fresh* batch starts at position 0: it attends to its own keys, causally, and leaves
them in the cache.  A *cached* batch (a decode step, or the rest of a prompt whose prefix is known) writes its
keys first and then reads the cache under a mask of positions.  The query heads that share a key-value head
stand at the same position, so they are one small batch of queries: keys and values are never repeated.

Nothing here waits for the device or depends on values, so a step can be compiled and captured.

Shapes: n rows, T tokens per row, D width, H heads, K key-value heads, E head width, S positions read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from flatout.multiplex.products.linear import correct_rows

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.multiplex.decode.cache import Cache
    from flatout.multiplex.factors import Factors
    from flatout.multiplex.models.decoder import Attention, Decoder, DecoderBlock, Mlp, Norm, Projection
    from flatout.multiplex.rows import RowTables


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where the rows of a batch stand, as blocks of one kind see it (Gemma has two kinds).

    `slots` [n] are the rows' slots in the cache, None for all of them in order.  `write` [n, T] is where the
    batch's keys go; None is a fresh batch at positions 0..T-1.  `mask` [n or 1, T, S] is True where attention
    may look; None is plain causality.  `cos`, `sin` [n or 1, T, 1, half] rotate the rows' queries and keys.
    """

    slots: Tensor | None
    write: Tensor | None
    mask: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


@dataclass(frozen=True, slots=True)
class Deltas:
    """What variants change in one block: factors of its products, and vectors [variants, D] added after it.

    `group`: rows lie in the order of their variants, so many to each; None: in any order.  `corrected` is a
    compiled form of the function of that name; None where nothing is compiled.
    """

    qkv: Factors | None = None
    out: Factors | None = None
    up: Factors | None = None
    down: Factors | None = None
    vectors: Tensor | None = None
    group: int | None = None
    corrected: Callable[..., tuple[Tensor, ...]] | None = None


def deltas_of(
    decoder: Decoder,
    factors: Mapping[str, Factors],
    vectors: Mapping[int, Tensor] | None = None,
    *,
    group: int | None = None,
    corrected: Callable[..., tuple[Tensor, ...]] | None = None,
) -> tuple[Deltas, ...]:
    """Sort factors, by projection name, and vectors, by layer, into blocks."""
    return tuple(
        Deltas(
            qkv=factors.get(block.attention.qkv.name),
            out=factors.get(block.attention.out.name),
            up=factors.get(block.mlp.up.name),
            down=factors.get(block.mlp.down.name),
            vectors=None if vectors is None else vectors.get(layer),
            group=group,
            corrected=corrected,
        )
        for layer, block in enumerate(decoder.blocks)
    )


def group_of(index: Tensor) -> int | None:
    """Return how many rows each variant has if they lie in its order, else None; waits for the device."""
    num_groups = int(index[-1]) + 1
    size = len(index) // num_groups
    ordered = torch.arange(len(index), device=index.device) // max(size, 1)
    return size if size * num_groups == len(index) and torch.equal(index, ordered) else None


# Where rows stand


def fresh_places(decoder: Decoder, *, slots: Tensor, num_tokens: int) -> tuple[RowPlaces, ...]:
    """Place rows at positions 0..num_tokens-1, one `RowPlaces` per block."""
    positions = torch.arange(num_tokens, device=decoder.device)[None]

    def mask(attention: Attention) -> Tensor | None:
        windowed = attention.window is not None and attention.window < num_tokens
        if not windowed and attention.softcap is None:
            return None
        return _visible(positions, positions[0], attention.window)

    return places_of(decoder, slots=slots, write=None, positions=positions, mask=mask)


def cached_places(
    decoder: Decoder,
    positions: Tensor,
    *,
    slots: Tensor | None,
    write: Tensor,
    bucket: int,
) -> tuple[RowPlaces, ...]:
    """Place rows at `positions` [n, T] that read the cache up to `bucket`, one `RowPlaces` per block."""
    keys = torch.arange(bucket, device=positions.device)

    def mask(attention: Attention) -> Tensor:
        return _visible(positions, keys, attention.window)

    return places_of(decoder, slots=slots, write=write, positions=positions, mask=mask)


def _visible(positions: Tensor, keys: Tensor, window: int | None) -> Tensor:
    seen = keys <= positions[..., None]
    return seen if window is None else seen & (keys > positions[..., None] - window)


def places_of(
    decoder: Decoder,
    *,
    slots: Tensor | None,
    write: Tensor | None,
    positions: Tensor,
    mask: Callable[[Attention], Tensor | None],
) -> tuple[RowPlaces, ...]:
    """Share one `RowPlaces` among blocks of one kind: its tensors are made once per batch."""
    made: dict[tuple[object, ...], RowPlaces] = {}
    places = []
    for block in decoder.blocks:
        attention = block.attention
        kind = (id(attention.cos), attention.window, attention.softcap)
        if kind not in made:
            cos = None if attention.cos is None else attention.cos[positions][:, :, None]
            sin = None if attention.sin is None else attention.sin[positions][:, :, None]
            made[kind] = RowPlaces(slots, write, mask(attention), cos, sin)
        places.append(made[kind])
    return tuple(places)


# The forward


def embed(decoder: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the residual stream [n, T, D] before the first block."""
    x = F.embedding(tokens, decoder.embedding)
    if decoder.embedding_scale is not None:
        x = x * decoder.embedding_scale
    if decoder.positions is not None:
        x = x + decoder.positions[positions]
    return x


def run_block(
    block: DecoderBlock,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    place: RowPlaces,
    tables: RowTables,
    deltas: Deltas,
) -> Tensor:
    """Run one block: return the residual stream after it and write the cache of its layer in place."""
    attended = attend(
        block.attention, normalise(block.attention_norm, x), keys, values, place, tables, deltas
    )
    if block.attention_out_norm is not None:
        attended = normalise(block.attention_out_norm, attended)
    if block.parallel:
        out = run_mlp(block.mlp, normalise(block.mlp_norm, x), tables, deltas)
        x = x + attended
    else:
        x = x + attended
        out = run_mlp(block.mlp, normalise(block.mlp_norm, x), tables, deltas)
    x = x + (out if block.mlp_out_norm is None else normalise(block.mlp_out_norm, out))
    if deltas.vectors is not None:
        added = deltas.vectors[tables.index].float() * tables.sign[:, None]
        x = x + added.to(x.dtype)[:, None]
    return x


def run_blocks(
    decoder: Decoder,
    x: Tensor,
    cache: Cache,
    places: tuple[RowPlaces, ...],
    tables: RowTables,
    deltas: tuple[Deltas, ...],
    *,
    run: Callable[..., Tensor] = run_block,
) -> Tensor:
    """Run every block in turn; `run` is `run_block` or a compiled form of it."""
    for layer, block in enumerate(decoder.blocks):
        x = run(block, x, cache.keys(layer), cache.values(layer), places[layer], tables, deltas[layer])
    return x


def logits_of(decoder: Decoder, x: Tensor) -> Tensor:
    """Return the logits [n, V] of the rows' hidden states [n, D]."""
    logits = F.linear(normalise(decoder.norm, x), decoder.head.weight, decoder.head.bias)
    return logits if decoder.softcap is None else torch.tanh(logits / decoder.softcap) * decoder.softcap


def normalise(norm: Norm, x: Tensor) -> Tensor:
    """Normalise with statistics in float32 and the product in the weight's type, as the families do."""
    if norm.centred:
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.offset:
        return (scaled * (norm.weight.float() + norm.offset)).to(x.dtype)
    return (scaled.to(norm.weight.dtype) * norm.weight).to(x.dtype)


def attend(
    attention: Attention,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    place: RowPlaces,
    tables: RowTables,
    deltas: Deltas,
) -> Tensor:
    """Attend causally from x [n, T, D] to its slots' keys, its own included."""
    n, num_tokens, _ = x.shape
    (qkv,) = product(attention.qkv, x, tables, deltas.qkv, deltas)
    q, k, v = _heads(attention, qkv)
    if attention.q_norm is not None:
        q = normalise(attention.q_norm, q)
    if attention.k_norm is not None:
        k = normalise(attention.k_norm, k)
    if place.cos is not None and place.sin is not None:
        q = rotate(q, place.cos, place.sin, attention.rotary_width)
        k = rotate(k, place.cos, place.sin, attention.rotary_width)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if place.write is None:
        keys[place.slots, :, :num_tokens], values[place.slots, :, :num_tokens] = k, v
    else:
        k, v = _through_cache(keys, values, k, v, place, place.write)
    out = _weighted(attention, q, k, v, place.mask)
    out = out.transpose(1, 2).reshape(n, num_tokens, -1)
    (out,) = product(attention.out, out, tables, deltas.out, deltas)
    return out


def _heads(attention: Attention, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [n, T, H, E], keys and values [n, T, K, E]: views of qkv, whatever their order."""
    heads, shared = attention.num_heads, attention.num_kv_heads
    if attention.interleaved:
        q, k, v = qkv.unflatten(-1, (heads, 3, attention.head_width)).unbind(3)
    else:
        qkv = qkv.unflatten(-1, (-1, attention.head_width))
        q, k, v = qkv.split((heads, shared, shared), dim=2)
    return q, k, v


def _through_cache(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, place: RowPlaces, write: Tensor
) -> tuple[Tensor, Tensor]:
    """Write k, v [n, K, T, E] at their positions; read back everything the mask may show."""
    assert place.mask is not None
    bucket = place.mask.shape[-1]
    rows = torch.arange(keys.shape[0], device=keys.device) if place.slots is None else place.slots
    keys[rows[:, None], :, write] = k.transpose(1, 2)
    values[rows[:, None], :, write] = v.transpose(1, 2)
    if place.slots is None:
        return keys[:, :, :bucket], values[:, :, :bucket]
    return keys[place.slots, :, :bucket], values[place.slots, :, :bucket]


def _weighted(attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return softmax(q k^T) v for q [n, H, T, E] and k, v [n, K, S, E]."""
    n, heads, num_tokens, width = q.shape
    shared = k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=attention.scale, enable_gqa=heads != shared
        )
    q = q.reshape(n, shared, heads // shared * num_tokens, width)
    mask = mask[:, None] if num_tokens == 1 else mask[:, None].repeat(1, 1, heads // shared, 1)
    if attention.softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attention.scale)
    else:
        scores = (q @ k.mT).float() * attention.scale
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v
    return out.reshape(n, heads, num_tokens, width)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, width: int) -> Tensor:
    """Rotate the first `width` columns of x [n, T, heads, E], column i with column i + width / 2."""
    first, second, rest = x.split((width // 2, width // 2, x.shape[-1] - width), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def run_mlp(mlp: Mlp, x: Tensor, tables: RowTables, deltas: Deltas) -> Tensor:
    """Run the MLP on x [n, T, D]."""
    if mlp.gated:
        gate, up = product(mlp.up, x, tables, deltas.up, deltas, parts=2)
        inner = activate(mlp, gate) * up
    else:
        (inner,) = product(mlp.up, x, tables, deltas.up, deltas)
        inner = activate(mlp, inner)
    (out,) = product(mlp.down, inner, tables, deltas.down, deltas)
    return out


def activate(mlp: Mlp, x: Tensor) -> Tensor:
    """Apply the MLP's non-linearity."""
    if mlp.activation == "silu":
        return F.silu(x)
    if mlp.activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if mlp.activation == "gelu_tanh" else "none")


def product(
    projection: Projection,
    x: Tensor,
    tables: RowTables,
    factors: Factors | None,
    deltas: Deltas,
    *,
    parts: int = 1,
) -> tuple[Tensor, ...]:
    """Return y = x W^T + b and each row's low-rank term, for x [n, T, in], cut into equal parts.

    See `factors` for the arithmetic.
    """
    y = F.linear(x, projection.weight, projection.bias)
    if factors is None:
        return y.chunk(parts, dim=-1)
    gain = tables.sign * factors.scale
    if torch.compiler.is_compiling() and x.shape[1] == 1:
        return corrected(y, x, factors.shrink, factors.expand, tables.index, gain, parts)
    if deltas.corrected is not None:
        return deltas.corrected(y, x, factors.shrink, factors.expand, tables.index, gain, parts)
    # In groups nothing is gathered: a copy of the factors would cost more than the products that read them.
    correct_rows(
        y,
        x,
        shrink=factors.shrink,
        expand=factors.expand,
        index=tables.index,
        gain=gain,
        group_size=deltas.group or 0,
    )
    return y.chunk(parts, dim=-1)


def corrected(
    y: Tensor, x: Tensor, shrink: Tensor, expand: Tensor, index: Tensor, gain: Tensor, parts: int
) -> tuple[Tensor, ...]:
    """Return the parts of y with the low-rank terms added: written for a compiler, slow without one.

    Rank by rank, the gathers ride in the reduction and in the addition: no factor is read twice or written.
    Each part has one reader, so that its addition can ride in that.
    """
    coefficients = [
        (x.float() * shrink[index, j][:, None].float()).sum(-1, keepdim=True) * gain[:, None, None]
        for j in range(shrink.shape[1])
    ]
    width = y.shape[-1] // parts
    found = []
    for start in range(0, y.shape[-1], width):
        out = y[..., start : start + width].float()
        for j, coefficient in enumerate(coefficients):
            out = out + coefficient * expand[index, j, start : start + width][:, None].float()
        found.append(out.to(y.dtype))
    return tuple(found)
