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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from flatout.multiplex.decode.steppers import EOS, LENGTH, SlotState
from flatout.multiplex.factors import Factors
from flatout.multiplex.kernels.attend import attend
from flatout.multiplex.kernels.choose import advance, best_of_chunks
from flatout.multiplex.kernels.gate import gate_up
from flatout.multiplex.kernels.norm import add_norm
from flatout.multiplex.kernels.split import shrink_rows, split_heads
from flatout.multiplex.models.decoder import Attention, Decoder, DecoderBlock, Mlp, Norm, Projection
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
    gate_dot: bool = False  # by tensor cores: int8 factors of a model that is not float32
    convert: bool = False  # int8 by the converter
    norm_registers: int | None = None  # at most so many a thread
    gate_along: bool = False  # neighbouring programs have neighbouring columns, not neighbouring rows
    attend_along: bool = False  # or neighbouring heads
    ahead: bool = False  # factors are asked for four ranks ahead of their use


def tiles_for(rank: int, shared: int, *, width: int = 0) -> Tiles:
    """Return the sizes that were fastest on an H200, by rank; `shared` neighbouring rows run one variant.

    From rank 4 on a wide row of factors needs twice the threads to stay in registers.
    """
    pair = 2 if shared % 2 == 0 else 1
    if rank == 0:
        return Tiles(norm_warps=4, gate_block=512, gate_warps=2)
    long = 4 <= rank < 16 and width > 1024
    return Tiles(
        norm_rows=pair,
        norm_warps=16 if rank >= 4 and width > 2048 else 8,
        attend_warps=2 if rank >= 4 else 1,
        gate_rows=pair,
        gate_block=1024 if long else 256,
        gate_warps=4 if long else 1,
        gate_dot=rank >= 16,
        convert=rank >= 16,
        norm_registers=64 if rank >= 16 and width <= 2048 else None,
    )


class Term(NamedTuple):
    """The low-rank term of one product; where it has none, rank 0 and tensors that no kernel reads."""

    rank: int
    shrink: Tensor
    expand: Tensor
    scale: float


@dataclass(slots=True)
class KernelCall:
    """The rows of one call, `num_tokens` of them to each row of `tables`, and what lies between products."""

    tables: RowTables
    num_tokens: int
    residual: Tensor
    normed: Tensor
    branch: Tensor
    qkv: Tensor
    mixed: Tensor
    joined: Tensor
    activated: Tensor
    shrunk: Tensor
    shrunk_parts: Tensor


class DecodeStep:
    """Runs `decoder` over the slots of `state`, all in buffers, so that a CUDA graph can hold a step."""

    def __init__(
        self,
        decoder: Decoder,
        state: SlotState,
        *,
        factors: Mapping[str, Factors] | None = None,
        vectors: Mapping[int, Tensor] | None = None,
        tiles: Tiles | None = None,
        tile: int = 1,
    ) -> None:
        self.decoder, self.state = decoder, state
        layers = range(len(decoder.blocks))
        self.keys = [state.cache.keys(layer) for layer in layers]
        self.values = [state.cache.values(layer) for layer in layers]
        self.vectors = dict(vectors or {})  # by the layer after which they are added
        self._terms = {
            name: Term(one.rank, one.shrink, one.expand, one.scale) for name, one in (factors or {}).items()
        }
        self._no_term = Term(0, decoder.norm.weight, decoder.norm.weight, 0.0)
        self.rank = next((term.rank for term in self._terms.values()), 0)
        self.tiles = tiles or tiles_for(self.rank, tile, width=decoder.width)
        self.num_rows, self.length = len(state.token), state.cache.num_positions
        self.call = self._call(self.num_rows, state.tables, 1)
        made: dict[str, Any] = {"device": decoder.device}
        self.logits = torch.empty(self.num_rows, decoder.vocabulary, dtype=decoder.dtype, **made)
        self.best_value = torch.empty(self.num_rows, CHUNKS, dtype=torch.float32, **made)
        self.best_token = torch.empty(self.num_rows, CHUNKS, dtype=torch.int32, **made)
        kinds = {one.shrink.dtype for one in self._terms.values()}
        self.dot = self.tiles.gate_dot and kinds == {torch.int8} and decoder.dtype != torch.float32
        self.precision = "ieee" if decoder.dtype == torch.float32 else "tf32"

    def decode(self, token: Tensor, position: Tensor) -> Tensor:
        """Return logits [rows, vocabulary] after `token` at `position` of every slot; write the cache."""
        call = self.call
        for number, block in enumerate(self.decoder.blocks):
            self._norm_before_attention(number, block, call, token)
            _product(call.normed, block.attention.qkv, call.qkv)
            self._attend(number, block.attention, position)
            _product(call.mixed, block.attention.out, call.branch)
            self._finish_block(block, call, call.shrunk_parts, parts=block.attention.num_kv_heads)
        last = self.decoder.blocks[-1].mlp
        self._add_norm(
            call, self.decoder.norm, before=last.down, coefficients=call.shrunk_parts,
            parts=self._gate_parts(last), vectors=self.vectors.get(len(self.decoder.blocks) - 1),
        )  # fmt: skip
        torch.mm(call.normed, self.decoder.head.weight.T, out=self.logits)
        return self.logits

    def prefill(self, tokens: Tensor, slots: Tensor) -> None:
        """Fill `slots` of the cache with prompts `tokens` [rows, T], from position 0 on, causally."""
        num_rows, num_tokens = tokens.shape
        call = self._call(num_rows * num_tokens, self.state.tables.take(slots), num_tokens)
        ids = tokens.reshape(-1)
        for number, block in enumerate(self.decoder.blocks):
            self._norm_before_attention(number, block, call, ids)
            _product(call.normed, block.attention.qkv, call.qkv)
            mixed = self._attend_prompt(number, block.attention, call, slots)
            if number == len(self.decoder.blocks) - 1:
                return  # the last keys and values are in the cache: nothing after them is read
            coefficients = self._shrink(block.attention.out, mixed, call)
            _product(mixed, block.attention.out, call.branch)
            self._finish_block(block, call, coefficients, parts=1)

    def best(self, logits: Tensor) -> None:
        """Leave the best token of every chunk of the vocabulary for `append`."""
        rows, vocabulary = logits.shape
        best_of_chunks[(rows, CHUNKS)](
            logits, self.best_value, self.best_token,
            VOCABULARY=vocabulary, CHUNK=triton.cdiv(vocabulary, CHUNKS), CHUNKS=CHUNKS, BLOCK=1024,
            num_warps=4,
        )  # fmt: skip

    def append(self) -> None:
        """Append the best token of every living row to the state: `State.advance` in one kernel."""
        state = self.state
        num_eos = state.eos.numel()
        advance[(self.num_rows,)](
            self.best_value, self.best_token, state.token, state.position, state.alive, state.reason,
            state.count, state.limit, state.emitted, state.emitted.stride(0), state.eos,
            EOS=EOS, LENGTH=LENGTH, NUM_EOS=num_eos, BLOCK_EOS=triton.next_power_of_2(max(1, num_eos)),
            CHUNKS=CHUNKS, num_warps=1,
        )  # fmt: skip

    def _call(self, rows: int, tables: RowTables, num_tokens: int) -> KernelCall:
        decoder, block = self.decoder, self.decoder.blocks[0]
        attention, mlp = block.attention, block.mlp
        inner = mlp.down.weight.shape[1]
        rank = max(self.rank, 1)
        parts = max(attention.num_kv_heads, triton.cdiv(inner, self.tiles.gate_block))

        def make(*shape: int, dtype: torch.dtype = decoder.dtype) -> Tensor:
            return torch.empty(rows, *shape, device=decoder.device, dtype=dtype)

        return KernelCall(
            tables=tables,
            num_tokens=num_tokens,
            residual=make(decoder.width),
            normed=make(decoder.width),
            branch=make(decoder.width),
            qkv=make(attention.qkv.weight.shape[0]),
            mixed=make(attention.num_heads * attention.head_width),
            joined=make(2 * inner),
            activated=make(inner),
            shrunk=make(rank, dtype=torch.float32),
            shrunk_parts=make(rank, parts, dtype=torch.float32),
        )

    def _term(self, product: Projection | None) -> Term:
        return self._no_term if product is None else self._terms.get(product.name, self._no_term)

    def _add_norm(
        self, call: KernelCall, norm: Norm, *, coefficients: Tensor, parts: int,
        before: Projection | None = None, after: Projection | None = None,
        token: Tensor | None = None, vectors: Tensor | None = None,
    ) -> None:  # fmt: skip
        tile = self._shared_rows(self.tiles.norm_rows, call)
        width, scale = self.decoder.width, self.decoder.embedding_scale
        last, coming = self._term(before), self._term(after)
        add_norm[(len(call.residual) // tile,)](
            call.residual, call.branch, call.branch if token is None else token,
            self.decoder.embedding, 1.0 if scale is None else scale, norm.weight, call.normed,
            coefficients, last.expand, coming.shrink, call.shrunk,
            norm.weight if vectors is None else vectors,
            call.tables.index, call.tables.sign, coming.scale, norm.eps, call.num_tokens,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), RANK_IN=last.rank, RANK_OUT=coming.rank,
            PARTS=parts, BLOCK_PARTS=triton.next_power_of_2(parts),
            FROM_BRANCH=token is None, SCALED=scale is not None, STEERED=vectors is not None, ROWS=tile,
            CONVERT=self.tiles.convert, AHEAD=self.tiles.ahead,
            num_warps=self.tiles.norm_warps, **_at_most(self.tiles.norm_registers),
        )  # fmt: skip

    def _shared_rows(self, wanted: int, call: KernelCall) -> int:
        """Return the rows of one program; several only where they are sure to run one variant.

        The slots of a step lie in tiles of one variant; those of a prefill come in any order, and only the
        tokens of one row belong together.
        """
        together = self.num_rows if call is self.call else call.num_tokens
        return wanted if together % wanted == 0 else 1

    def _norm_before_attention(
        self, number: int, block: DecoderBlock, call: KernelCall, token: Tensor
    ) -> None:
        first = number == 0
        self._add_norm(
            call, block.attention_norm,
            before=None if first else self.decoder.blocks[number - 1].mlp.down, after=block.attention.qkv,
            coefficients=call.shrunk_parts, parts=self._gate_parts(block.mlp),
            token=token if first else None, vectors=self.vectors.get(number - 1),
        )  # fmt: skip

    def _finish_block(
        self, block: DecoderBlock, call: KernelCall, coefficients: Tensor, *, parts: int
    ) -> None:
        self._add_norm(
            call, block.mlp_norm,
            before=block.attention.out, after=block.mlp.up, coefficients=coefficients, parts=parts,
        )  # fmt: skip
        _product(call.normed, block.mlp.up, call.joined)
        self._gate(block.mlp, call)
        _product(call.activated, block.mlp.down, call.branch)

    def _gate_parts(self, mlp: Mlp) -> int:
        return int(triton.cdiv(mlp.down.weight.shape[1], self.tiles.gate_block))

    def _gate(self, mlp: Mlp, call: KernelCall) -> None:
        rows, width = call.activated.shape
        tile = self._shared_rows(self.tiles.gate_rows, call)
        parts = self._gate_parts(mlp)
        up, down = self._term(mlp.up), self._term(mlp.down)
        grid = (rows // tile * parts,) if self.tiles.gate_along else (rows // tile, parts)
        gate_up[grid](
            call.joined, call.activated, call.shrunk, up.expand, down.shrink, call.shrunk_parts,
            call.tables.index, call.tables.sign, down.scale, call.num_tokens,
            WIDTH=width, BLOCK=self.tiles.gate_block, PARTS=parts, RANK=up.rank, ROWS=tile,
            KIND=mlp.activation,
            DOT=max(16, triton.next_power_of_2(up.rank)) if self.dot and up.rank else 0,
            CONVERT=self.tiles.convert, ALONG=self.tiles.gate_along,
            AHEAD=self.tiles.ahead and up.rank > 0 and up.rank % 4 == 0,
            num_warps=self.tiles.gate_warps,
        )  # fmt: skip

    def _attend(self, number: int, attention: Attention, position: Tensor) -> None:
        call, qkv, out = self.call, self._term(attention.qkv), self._term(attention.out)
        group = triton.next_power_of_2(attention.num_heads // attention.num_kv_heads)
        kv_heads, along = attention.num_kv_heads, self.tiles.attend_along
        attend[(self.num_rows * kv_heads,) if along else (self.num_rows, kv_heads)](
            call.qkv, *_head_tensors(attention), self.keys[number], self.values[number], call.mixed,
            position, call.shrunk, qkv.expand, out.shrink, call.shrunk_parts,
            call.tables.index, call.tables.sign, out.scale,
            attention.scale, _norm_eps(attention), self.length, attention.window or 0,
            H=attention.num_heads, K=attention.num_kv_heads, E=attention.head_width,
            GROUP=group, COPIES=max(1, 16 // group), RANK=qkv.rank,
            TILE=self.tiles.attend_tile, STAGES=self.tiles.attend_stages,
            BIASED=attention.qkv.bias is not None,
            NORMED=attention.q_norm is not None, WINDOWED=attention.window is not None,
            PRECISION=self.precision, CONVERT=self.tiles.convert, ALONG=along,
            num_warps=self.tiles.attend_warps,
        )  # fmt: skip

    def _attend_prompt(self, number: int, attention: Attention, call: KernelCall, slots: Tensor) -> Tensor:
        rows, num_tokens, qkv = len(slots), call.num_tokens, self._term(attention.qkv)
        heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_width
        q = call.qkv.new_empty(rows, heads, num_tokens, width)
        k, v = (call.qkv.new_empty(rows, kv_heads, num_tokens, width) for _ in range(2))
        split_heads[(rows * num_tokens, heads + 2 * kv_heads)](
            call.qkv, *_head_tensors(attention), q, k, v, self.keys[number], self.values[number], slots,
            call.shrunk, qkv.expand, call.tables.index, _norm_eps(attention), num_tokens, self.length,
            H=heads, K=kv_heads, E=width, RANK=qkv.rank,
            BIASED=attention.qkv.bias is not None, NORMED=attention.q_norm is not None, num_warps=1,
        )  # fmt: skip
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=attention.scale, enable_gqa=heads != kv_heads
        )
        return mixed.transpose(1, 2).reshape(rows * num_tokens, heads * width)

    def _shrink(self, product: Projection, x: Tensor, call: KernelCall) -> Tensor:
        """Compute the coefficients of a prompt's product, where no kernel before it has."""
        term = self._term(product)
        if not term.rank:
            return call.shrunk
        rows, width = x.shape
        shrunk = torch.empty(rows, term.rank, 1, device=x.device, dtype=torch.float32)
        shrink_rows[(rows,)](
            x, term.shrink, shrunk, call.tables.index, call.tables.sign, term.scale, call.num_tokens,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), RANK=term.rank, num_warps=4,
        )  # fmt: skip
        return shrunk


def _product(x: Tensor, product: Projection, out: Tensor) -> None:
    torch.mm(x, product.weight.T, out=out)


def _head_tensors(attention: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return bias, rotation tables and head norms; any tensor for a missing one, which is not read."""
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


def _at_most(registers: int | None) -> dict[str, int]:
    return {} if registers is None else {"maxnreg": registers}


def _norm_eps(attention: Attention) -> float:
    return 0.0 if attention.q_norm is None else attention.q_norm.eps
