"""The layers of BERT-like encoders, called without what Hugging Face's modules do around them.

A step that is not recorded is bound by the host.  Of a layer's time there, half is modules calling modules,
looking up signatures and turning query, key and value from tokens to heads and back, for the same dozen
operators: attention, a norm, two linear maps around an activation, a norm.  Here these are called one after
another on packed tokens [N, width].  They are the model's own modules, adapted or not.

Only families whose layer is known to be this are taken; whoever uses it compares the states with the model's.

Shapes: N tokens, H heads, D width of a head, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flatout.engines.adapters.lora.added_norm import added_norm
from flatout.engines.adapters.lora.attention import RowBounds, attend

FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderLayer:
    """One layer, as its parts."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    mix: nn.Linear  # of the heads
    mix_norm: nn.LayerNorm
    widen: nn.Linear
    activation: Callable[[Tensor], Tensor]
    narrow: nn.Linear
    narrow_norm: nn.LayerNorm
    num_heads: int
    scaling: float

    def __call__(self, x_NW: Tensor, residual_NW: Tensor, bounds: RowBounds) -> tuple[Tensor, Tensor]:
        """The states after this layer, for its two readers: the next one's maps and its residual add.

        `forward` of a linear map may be an adapted one.
        """
        shape = len(x_NW), self.num_heads, -1
        seen_NHD = attend(
            self.query.forward(x_NW).view(shape),
            self.key.forward(x_NW).view(shape),
            self.value.forward(x_NW).view(shape),
            bounds,
            scaling=self.scaling,
        )
        mixed_NW = self.mix.forward(seen_NHD.reshape(x_NW.shape))
        y_NW, residual_NW = added_norm(self.mix_norm, mixed_NW, residual_NW)
        wide = self.activation(self.widen.forward(y_NW))
        return added_norm(self.narrow_norm, self.narrow.forward(wide), residual_NW)


def layers_of(model: Any) -> tuple[EncoderLayer, ...] | None:
    """The layers of a model, first to last; None where its family is another."""
    config = model.config
    is_known = config.model_type in FAMILIES and not getattr(config, "is_decoder", False)
    if not is_known or getattr(config, "position_embedding_type", "absolute") != "absolute":
        return None
    return tuple(_layer(layer) for layer in model.encoder.layer)


def _layer(layer: Any) -> EncoderLayer:
    heads = layer.attention.self
    return EncoderLayer(
        query=heads.query,
        key=heads.key,
        value=heads.value,
        mix=layer.attention.output.dense,
        mix_norm=layer.attention.output.LayerNorm,
        widen=layer.intermediate.dense,
        activation=layer.intermediate.intermediate_act_fn,
        narrow=layer.output.dense,
        narrow_norm=layer.output.LayerNorm,
        num_heads=heads.num_attention_heads,
        scaling=heads.attention_head_size**-0.5,
    )
