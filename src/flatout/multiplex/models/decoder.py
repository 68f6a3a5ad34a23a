"""A causal language model as a list of products and what lies between them.

Hugging Face's families differ in spelling more than in substance.  `Decoder` states the substance: an
embedding, blocks of (norm, attention, norm, MLP) around a residual stream, a final norm and a head.
Everything that runs a model here (the portable forward, the hand-written decode step) reads a `Decoder` and
knows no family; reading a family is `families.py`.

The query, key and value products of a block are one product, as are gate and up: one `Projection` whose
weight stacks the parts.  A model that stores them apart is stacked in place: its parameters become views of
the stacked storage, so no weight exists twice.  Low-rank variants are keyed by `Projection.name`.

Shapes: V vocabulary, D width, H heads, K key-value heads, E head width, I the MLP's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Projection:
    """y = x weight^T + bias, weight [out, in]; `parts` names the modules that the rows of weight belong to.

    `name` is the module's own name where the model stores one module (`h.0.attn.c_attn`), and the parts
    joined with "+" where several are stacked (`model.layers.0.self_attn.q_proj+k_proj+v_proj`).
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    parts: tuple[tuple[str, int], ...]  # (module name, rows of weight), in order


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Norm:
    """RMS norm (`centred` False) or layer norm (True): normalised x * (weight + offset) + bias.

    Gemma stores the factor less 1, hence `offset`, which an RMS norm adds in float32.
    """

    weight: Tensor
    bias: Tensor | None = None
    eps: float
    centred: bool
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attention:
    """Causal attention with K key-value heads serving H query heads.

    `qkv` rows are [H*E queries | K*E keys | K*E values]; if `interleaved` (GPT-NeoX, K = H), they are
    [E queries | E keys | E values] of one head after the other.  `rotary_width` leading columns of each head
    are rotated (column i pairs with i + rotary_width/2) by the tables `cos`/`sin` [positions,
    rotary_width/2] of the decoder's type; None: no rotation.  `window`: a position sees only the last
    `window` positions, itself included.  `softcap`: scores become cap * tanh(scores / cap).
    """

    qkv: Projection
    out: Projection
    num_heads: int
    num_kv_heads: int
    head_width: int
    scale: float
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    rotary_width: int = 0
    window: int | None = None
    softcap: float | None = None
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mlp:
    """down(activation(gate) * up) with `up` rows [I gate | I up] if `gated`, else down(activation(up))."""

    up: Projection
    down: Projection
    activation: Activation
    gated: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecoderBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)); `parallel` (NeoX): both read the same x and are added.

    `attention_out_norm` and `mlp_out_norm` (Gemma 2, 3) act on a branch before it joins the residual.
    """

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    parallel: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decoder:
    """A whole causal language model; `head` shares the embedding's storage where the model ties them."""

    embedding: Tensor  # [V, D]
    blocks: tuple[DecoderBlock, ...]
    norm: Norm
    head: Projection
    max_positions: int
    embedding_scale: float | None = None
    positions: Tensor | None = None  # learned, [max positions, D] (GPT-2)
    softcap: float | None = None

    def __post_init__(self) -> None:
        """Refuse a wider rotary table: it would widen the keys, and the cache could not hold them."""
        for block in self.blocks:
            for table in (block.attention.cos, block.attention.sin):
                if table is not None and table.dtype != self.dtype:
                    raise BadInput(
                        f"{block.attention.qkv.name} is rotated in {table.dtype}, the model is {self.dtype}",
                        hint="make cos and sin in the type of the embedding",
                    )

    @property
    def width(self) -> int:
        """D."""
        return self.embedding.shape[1]

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.head.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations and of the cache."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where every weight lies."""
        return self.embedding.device

    def projections(self) -> dict[str, Projection]:
        """Return every product of the blocks by name, in order of use; not the head, which gets no noise."""
        found = {}
        for block in self.blocks:
            for product in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down):
                found[product.name] = product
        return found
