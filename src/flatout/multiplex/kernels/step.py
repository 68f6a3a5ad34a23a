"""A decode step of a Llama-shaped model in which every row runs its own low-rank variant.

The products stay in cuBLAS and no kernel is added for the correction: the kernels that plain inference needs
between two products carry it.

    kernel                      adds the correction of            computes the coefficients of
    residual add + RMS norm     attention's output, MLP's down    qkv, gate-up
    cache write + attention     qkv                               attention's output (a partial per kv head)
    activation(gate) * up       gate-up                           down (a partial per block of columns)

With rank 0 the same kernels compile to plain inference.  Prefill runs the same kernels over rows * tokens,
with a stock attention kernel in the middle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from flatout.multiplex.decode.steppers import EOS, LENGTH, State
from flatout.multiplex.factors import Factors
from flatout.multiplex.kernels.attend import attend
from flatout.multiplex.kernels.choose import advance, best_of_chunks
from flatout.multiplex.kernels.gate import gate_up
from flatout.multiplex.kernels.norm import add_norm
from flatout.multiplex.kernels.split import shrink_rows, split_heads
from flatout.multiplex.models.decoder import Attention, Block, Decoder, Mlp, Norm, Projection
from flatout.multiplex.rows import RowTables

CHUNKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Sizes that change speed and nothing else: rows that share one load of factors, blocks and warps."""

    norm_rows: int = 1
    norm_warps: int = 8
    attend_tile: int = 16
    attend_warps: int = 1
    attend_stages: int = 3
    gate_rows: int = 1
    gate_block: int = 256
    gate_warps: int = 1


def tiles_for(rank: int, shared: int, *, width: int = 0) -> Tiles:
    """The sizes that were fastest on an H200, by rank; `shared` neighbouring rows run one variant.

    At rank 4 a wide row of factors needs twice the threads to stay in registers.
    """
    pair = 2 if shared % 2 == 0 else 1
    if rank == 0:
        return Tiles(norm_warps=4, gate_block=512, gate_warps=2)
    return Tiles(norm_rows=pair, norm_warps=16 if rank >= 4 and width > 2048 else 8, gate_rows=pair)


@dataclass(slots=True)
class Buffers:
    """What lies between the products of one call of `rows` rows."""

    residual: Tensor
    normed: Tensor
    branch: Tensor
    qkv: Tensor
    mixed: Tensor
    joined: Tensor
    activated: Tensor
    shrunk: Tensor
    shrunk_parts: Tensor


class FusedStep:
    """Runs `decoder` over slots of a cache; all state lies in buffers, so a CUDA graph can hold it."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        keys: list[Tensor],
        values: list[Tensor],
        tables: RowTables,
        factors: Mapping[str, Factors] | None,
        vectors: Mapping[int, Tensor] | None = None,
        tiles: Tiles | None = None,
        tile: int = 1,
    ) -> None:
        self.decoder = decoder
        self.keys, self.values = keys, values
        self.tables = tables
        self.factors = dict(factors or {})
        self.vectors = dict(vectors or {})  # by the layer after which they are added
        self.rank = next((f.rank for f in self.factors.values()), 0)
        self.tiles = tiles or tiles_for(self.rank, tile, width=decoder.width)
        self.num_rows = keys[0].shape[0]
        self.length = keys[0].shape[2]
        self.buffers = self._buffers(self.num_rows)
        self.logits = torch.empty(
            self.num_rows, decoder.vocabulary, device=decoder.device, dtype=decoder.dtype
        )
        best = (self.num_rows, CHUNKS)
        self.best_value = torch.empty(best, device=decoder.device, dtype=torch.float32)
        self.best_token = torch.empty(best, device=decoder.device, dtype=torch.int32)
        self.precision = "ieee" if decoder.dtype == torch.float32 else "tf32"

    def decode(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits [rows, vocabulary] after `token` at `position` of every slot; writes the cache."""
        buffers = self.buffers
        for number, block in enumerate(self.decoder.blocks):
            self._norm_before_attention(number, block, buffers, token, self.tables, 1)
            _product(buffers.normed, block.attention.qkv, buffers.qkv)
            self._attend(number, block, buffers, position)
            _product(buffers.mixed, block.attention.out, buffers.branch)
            parts = block.attention.num_kv_heads
            self._finish_block(block, buffers, self.tables, 1, parts, buffers.shrunk_parts)
        self._last_norm(buffers, self.tables, 1)
        torch.mm(buffers.normed, self.decoder.head.weight.T, out=self.logits)
        return self.logits

    def prefill(self, tokens: Tensor, slots: Tensor) -> None:
        """Fill `slots` of the cache with prompts `tokens` [rows, T], from position 0 on, causally."""
        num_rows, num_tokens = tokens.shape
        buffers = self._buffers(num_rows * num_tokens)
        tables = self.tables.take(slots)
        ids = tokens.reshape(-1)
        for number, block in enumerate(self.decoder.blocks):
            self._norm_before_attention(number, block, buffers, ids, tables, num_tokens)
            _product(buffers.normed, block.attention.qkv, buffers.qkv)
            mixed = self._attend_prompt(number, block.attention, buffers, tables, slots, num_tokens)
            if number == len(self.decoder.blocks) - 1:
                return  # the last keys and values are in the cache: nothing after them is read
            coefficients = buffers.shrunk
            if self._rank(block.attention.out):
                coefficients = self._shrink(block.attention.out, mixed, tables, num_tokens)
            _product(mixed, block.attention.out, buffers.branch)
            self._finish_block(block, buffers, tables, num_tokens, 1, coefficients)

    def best(self, logits: Tensor) -> None:
        """Leave the best token of every chunk of the vocabulary for `append`."""
        rows, vocabulary = logits.shape
        best_of_chunks[(rows, CHUNKS)](
            logits, self.best_value, self.best_token,
            VOCABULARY=vocabulary, CHUNK=triton.cdiv(vocabulary, CHUNKS), CHUNKS=CHUNKS, BLOCK=1024,
            num_warps=4,
        )  # fmt: skip

    def append(self, state: State) -> None:
        """Append the best token of every living row to `state`: `State.advance` in one kernel."""
        num_eos = state.eos.numel()
        advance[(self.num_rows,)](
            self.best_value, self.best_token, state.token, state.position, state.alive, state.reason,
            state.count, state.limit, state.emitted, state.emitted.stride(0), state.eos,
            EOS=EOS, LENGTH=LENGTH, NUM_EOS=num_eos, BLOCK_EOS=triton.next_power_of_2(max(1, num_eos)),
            CHUNKS=CHUNKS, num_warps=1,
        )  # fmt: skip

    def _buffers(self, rows: int) -> Buffers:
        decoder, block = self.decoder, self.decoder.blocks[0]
        attention, mlp = block.attention, block.mlp
        inner = mlp.down.weight.shape[1]
        rank = max(self.rank, 1)
        parts = max(attention.num_kv_heads, triton.cdiv(inner, self.tiles.gate_block))

        def make(*shape: int, dtype: torch.dtype = decoder.dtype) -> Tensor:
            return torch.empty(shape, device=decoder.device, dtype=dtype)

        return Buffers(
            residual=make(rows, decoder.width),
            normed=make(rows, decoder.width),
            branch=make(rows, decoder.width),
            qkv=make(rows, attention.qkv.weight.shape[0]),
            mixed=make(rows, attention.num_heads * attention.head_width),
            joined=make(rows, 2 * inner),
            activated=make(rows, inner),
            shrunk=make(rows, rank, dtype=torch.float32),
            shrunk_parts=make(rows, rank, parts, dtype=torch.float32),
        )

    def _rank(self, product: Projection | None) -> int:
        found = None if product is None else self.factors.get(product.name)
        return 0 if found is None else found.rank

    def _side(self, product: Projection | None, side: str, other: Tensor) -> Tensor:
        """A factor, or any tensor where there is none and the kernel will not read it."""
        found = None if product is None else self.factors.get(product.name)
        return other if found is None else (found.shrink if side == "shrink" else found.expand)

    def _scale(self, product: Projection | None) -> float:
        found = None if product is None else self.factors.get(product.name)
        return 0.0 if found is None else found.scale

    def _add_norm(
        self, buffers: Buffers, norm: Norm, tables: RowTables, num_tokens: int, *,
        before: Projection | None, after: Projection | None,
        coefficients: Tensor, parts: int, token: Tensor | None = None, vectors: Tensor | None = None,
    ) -> None:  # fmt: skip
        rows = buffers.residual.shape[0]
        tile = self._shared_rows(self.tiles.norm_rows, tables, num_tokens)
        width = self.decoder.width
        scale = self.decoder.embedding_scale
        add_norm[(rows // tile,)](
            buffers.residual, buffers.branch, buffers.branch if token is None else token,
            self.decoder.embedding, 1.0 if scale is None else scale, norm.weight, buffers.normed,
            coefficients, self._side(before, "expand", norm.weight), self._side(after, "shrink", norm.weight),
            buffers.shrunk, norm.weight if vectors is None else vectors,
            tables.index, tables.sign, self._scale(after), norm.eps, num_tokens,
            WIDTH=width, BLOCK=triton.next_power_of_2(width),
            RANK_IN=self._rank(before), RANK_OUT=self._rank(after),
            PARTS=parts, BLOCK_PARTS=triton.next_power_of_2(parts),
            FROM_BRANCH=token is None, SCALED=scale is not None, STEERED=vectors is not None, ROWS=tile,
            num_warps=self.tiles.norm_warps,
        )  # fmt: skip

    def _shared_rows(self, wanted: int, tables: RowTables, num_tokens: int) -> int:
        """Rows of one program; more than one only where they are sure to run one variant.

        The slots of a step lie in tiles of one variant; those of a prefill come in any order, and only the
        tokens of one row belong together.
        """
        together = self.num_rows if tables is self.tables else num_tokens
        return wanted if together % wanted == 0 else 1

    def _norm_before_attention(
        self, number: int, block: Block, buffers: Buffers, token: Tensor, tables: RowTables, num_tokens: int
    ) -> None:
        first = number == 0
        before = None if first else self.decoder.blocks[number - 1].mlp.down
        self._add_norm(
            buffers, block.attention_norm, tables, num_tokens,
            before=before, after=block.attention.qkv,
            coefficients=buffers.shrunk_parts, parts=self._gate_parts(block.mlp),
            token=token if first else None, vectors=self.vectors.get(number - 1),
        )  # fmt: skip

    def _last_norm(self, buffers: Buffers, tables: RowTables, num_tokens: int) -> None:
        last = self.decoder.blocks[-1].mlp
        self._add_norm(
            buffers, self.decoder.norm, tables, num_tokens,
            before=last.down, after=None, coefficients=buffers.shrunk_parts, parts=self._gate_parts(last),
            vectors=self.vectors.get(len(self.decoder.blocks) - 1),
        )  # fmt: skip

    def _finish_block(
        self, block: Block, buffers: Buffers, tables: RowTables, num_tokens: int, parts: int,
        coefficients: Tensor,
    ) -> None:  # fmt: skip
        self._add_norm(
            buffers, block.mlp_norm, tables, num_tokens,
            before=block.attention.out, after=block.mlp.up, coefficients=coefficients, parts=parts,
        )  # fmt: skip
        _product(buffers.normed, block.mlp.up, buffers.joined)
        self._gate(block.mlp, buffers, tables, num_tokens)
        _product(buffers.activated, block.mlp.down, buffers.branch)

    def _gate_parts(self, mlp: Mlp) -> int:
        return int(triton.cdiv(mlp.down.weight.shape[1], self.tiles.gate_block))

    def _gate(self, mlp: Mlp, buffers: Buffers, tables: RowTables, num_tokens: int) -> None:
        rows, width = buffers.activated.shape
        tile = self._shared_rows(self.tiles.gate_rows, tables, num_tokens)
        parts = self._gate_parts(mlp)
        gate_up[(rows // tile, parts)](
            buffers.joined, buffers.activated, buffers.shrunk,
            self._side(mlp.up, "expand", buffers.shrunk), self._side(mlp.down, "shrink", buffers.shrunk),
            buffers.shrunk_parts, tables.index, tables.sign, self._scale(mlp.down), num_tokens,
            WIDTH=width, BLOCK=self.tiles.gate_block, PARTS=parts, RANK=self._rank(mlp.up), ROWS=tile,
            KIND=mlp.activation,
            num_warps=self.tiles.gate_warps,
        )  # fmt: skip

    def _attend(self, number: int, block: Block, buffers: Buffers, position: Tensor) -> None:
        attention = block.attention
        group = triton.next_power_of_2(attention.num_heads // attention.num_kv_heads)
        attend[(self.num_rows, attention.num_kv_heads)](
            buffers.qkv, *_head_tensors(attention), self.keys[number], self.values[number], buffers.mixed,
            position, buffers.shrunk, self._side(attention.qkv, "expand", buffers.shrunk),
            self._side(attention.out, "shrink", buffers.shrunk), buffers.shrunk_parts,
            self.tables.index, self.tables.sign, self._scale(attention.out),
            attention.scale, _norm_eps(attention), self.length, attention.window or 0,
            H=attention.num_heads, K=attention.num_kv_heads, E=attention.head_width,
            GROUP=group, COPIES=max(1, 16 // group), RANK=self._rank(attention.qkv),
            TILE=self.tiles.attend_tile, STAGES=self.tiles.attend_stages,
            BIASED=attention.qkv.bias is not None,
            NORMED=attention.q_norm is not None, WINDOWED=attention.window is not None,
            PRECISION=self.precision,
            num_warps=self.tiles.attend_warps,
        )  # fmt: skip

    def _attend_prompt(
        self,
        number: int,
        attention: Attention,
        buffers: Buffers,
        tables: RowTables,
        slots: Tensor,
        num_tokens: int,
    ) -> Tensor:
        rows = slots.shape[0]
        heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_width
        made: dict[str, Any] = {"device": buffers.qkv.device, "dtype": buffers.qkv.dtype}
        q = torch.empty(rows, heads, num_tokens, width, **made)
        k, v = (torch.empty(rows, kv_heads, num_tokens, width, **made) for _ in range(2))
        split_heads[(rows * num_tokens, heads + 2 * kv_heads)](
            buffers.qkv, *_head_tensors(attention), q, k, v, self.keys[number], self.values[number], slots,
            buffers.shrunk, self._side(attention.qkv, "expand", buffers.shrunk), tables.index,
            _norm_eps(attention), num_tokens, self.length,
            H=heads, K=kv_heads, E=width, RANK=self._rank(attention.qkv),
            BIASED=attention.qkv.bias is not None, NORMED=attention.q_norm is not None, num_warps=1,
        )  # fmt: skip
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=attention.scale, enable_gqa=heads != kv_heads
        )
        return mixed.transpose(1, 2).reshape(rows * num_tokens, heads * width)

    def _shrink(self, product: Projection, x: Tensor, tables: RowTables, num_tokens: int) -> Tensor:
        factors = self.factors[product.name]
        rows, width = x.shape
        shrunk = torch.empty(rows, factors.rank, 1, device=x.device, dtype=torch.float32)
        shrink_rows[(rows,)](
            x, factors.shrink, shrunk, tables.index, tables.sign, factors.scale, num_tokens,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), RANK=factors.rank, num_warps=4,
        )  # fmt: skip
        return shrunk


def _product(x: Tensor, product: Projection, out: Tensor) -> None:
    torch.mm(x, product.weight.T, out=out)


def _head_tensors(attention: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bias, rotation tables and head norms; any tensor where there is none: the kernel will not read it."""
    assert attention.cos is not None and attention.sin is not None
    unread = attention.cos
    bias = attention.qkv.bias
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return (
        unread if bias is None else bias,
        attention.cos,
        attention.sin,
        unread if q_norm is None else q_norm.weight,
        unread if k_norm is None else k_norm.weight,
    )


def _norm_eps(attention: Attention) -> float:
    return 0.0 if attention.q_norm is None else attention.q_norm.eps
