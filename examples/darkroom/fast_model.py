"""The same transformer without a loop: one gather builds every sequence, and nothing waits for the device.

`FastDarkroom` has the parameters of `DarkroomTransformer`, under the same names, and computes the same
logits and gradients for a batch.  What differs is how:

    gather      all tokens of all samples by one ragged concatenation, to a length that the shapes fix,
                so that the host never asks the device how long the longest sample is
    causal      attention is told that it is causal, instead of being handed a mask of floats, so that
                a kernel can skip the half that is masked
    answer row  the heads read one row of the last layer; only that row is computed there

The answer is read where `DarkroomTransformer` reads it: at the last position of the longest sample, which
is padding for all the others.  `mend` reads each sample's own last position, the query.  Attention is
causal, so whatever stands behind the row that is read never matters, and padding further than the longest
sample changes nothing.

Shapes in names: B samples, N context rows, F numbers of a transition, L tokens, D width, H heads, W width
of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from dataset import NO_ACTION, TRANSITION, Batch
from histories import GRID
from model import TYPE_LOSS_WEIGHT, DarkroomTransformer
from torch import Tensor, nn

from flatout.data import ragged

NUM_HEADS = 4
MOST_TOKENS_BESIDE_ROWS = 4  # start, end, start, query


class FastDarkroom(DarkroomTransformer):
    """`DarkroomTransformer` at the speed of its arithmetic; see the module's text for the flags."""

    grid_strides: Tensor
    causal_mask: Tensor

    def __init__(self, *, mend: bool = False, causal: bool = True, answer_row: bool = True) -> None:
        super().__init__()
        self.mend, self.causal, self.answer_row = mend, causal, answer_row
        most_tokens = self.positions.size(1)
        mask = torch.triu(torch.full((most_tokens, most_tokens), float("-inf")), diagonal=1)
        self.register_buffer("causal_mask", mask, persistent=False)
        self.register_buffer("grid_strides", torch.tensor([GRID, 1]), persistent=False)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits of the action (B, 5) and of the token type (B, 3) that follow the query.

        Reads the batches of `collate` and those of `fast_data`, which hold rows and cells ready made.
        """
        rows_BNF = batch["transitions"] if "transitions" in batch else transition_rows(batch)
        cell_B = batch["cell"] if "cell" in batch else (batch["query"] * self.grid_strides).sum(-1)
        device = self.positions.device
        previous_B = torch.as_tensor(batch["previous_length"], device=device)
        current_B = torch.as_tensor(batch["current_length"], device=device)
        tokens_BLD = self.build_sequence(
            self.embed_transition(rows_BNF), self.embed_state(cell_B), previous_B, current_B
        )
        hidden_BLD = tokens_BLD + self.positions[:, : tokens_BLD.size(1)]
        answer_BD = self.encode(hidden_BLD, self.answer_positions(previous_B, current_B))
        return self.action_head(answer_BD), self.type_head(answer_BD)

    def answer_positions(self, previous_B: Tensor, current_B: Tensor) -> Tensor:
        """The position that the heads read, for each sample."""
        last_B = num_tokens(previous_B, current_B) - 1
        return last_B if self.mend else last_B.max().expand_as(last_B)

    def build_sequence(  # type: ignore[override]
        self, context: Tensor, query: Tensor, previous_length: Tensor, current_length: Tensor
    ) -> Tensor:
        """Tokens of every sample, zeros behind them, N + 4 in length whatever the samples: B L D."""
        kind = self.token_type.weight
        start, end = self.region_start + kind[1], self.region_end + kind[2]
        rows, has_previous = context + kind[0], previous_length > 0
        return ragged.concat(
            [
                ragged.constant(start, where=has_previous),
                ragged.rows(rows, previous_length),
                ragged.constant(end, where=has_previous),
                ragged.constant(start),
                ragged.rows(rows, current_length, start=previous_length),
                ragged.each(query + kind[0]),
            ],
            max_length=context.size(1) + MOST_TOKENS_BESIDE_ROWS,
        ).values

    def encode(self, hidden_BLD: Tensor, answer_B: Tensor) -> Tensor:
        """The row of the last layer that the heads read: B D."""
        layers = list(self.encoder.layers)
        if self.answer_row:
            for layer in layers[:-1]:
                hidden_BLD = self.layer_over_all(layer, hidden_BLD)
            return layer_at_answer(layers[-1], hidden_BLD, answer_B)
        for layer in layers:
            hidden_BLD = self.layer_over_all(layer, hidden_BLD)
        return at_positions(hidden_BLD, answer_B)

    def layer_over_all(self, layer: nn.TransformerEncoderLayer, hidden_BLD: Tensor) -> Tensor:
        if self.causal:
            return causal_layer(layer, hidden_BLD)
        length = hidden_BLD.size(1)
        # is_causal=False: the encoder itself would read the mask back to see whether it is causal
        mask_LL = self.causal_mask[:length, :length]
        result: Tensor = layer(hidden_BLD, src_mask=mask_LL, is_causal=False)
        return result


def transition_rows(batch: Batch) -> Tensor:
    """What `embed_transition` reads, from the fields of `collate`: B N F."""
    columns = [batch["states"], batch["actions"], batch["rewards"].unsqueeze(-1), batch["next_states"]]
    return torch.cat(columns, dim=-1)


def num_tokens(previous_B: Tensor, current_B: Tensor) -> Tensor:
    """Tokens of each sample: a start and an end beside the previous region, a start and the query beside the
    current one.
    """
    return torch.where(previous_B > 0, previous_B + 2, 0) + current_B + 2


def causal_layer(layer: nn.TransformerEncoderLayer, hidden_BLD: Tensor) -> Tensor:
    """One encoder layer; every position sees itself and what stands before it."""
    query, key, value = projected(layer, hidden_BLD)
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return after_attention(layer, hidden_BLD, attended)


def layer_at_answer(layer: nn.TransformerEncoderLayer, hidden_BLD: Tensor, answer_B: Tensor) -> Tensor:
    """One encoder layer, at one position of each sample: B D."""
    attention, width = layer.self_attn, hidden_BLD.size(-1)
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    answer_B1D = at_positions(hidden_BLD, answer_B).unsqueeze(1)
    query_BH1W = by_head(F.linear(answer_B1D, weight[:width], bias[:width]))
    keys_values = F.linear(hidden_BLD, weight[width:], bias[width:])
    key_BHLW, value_BHLW = (by_head(half) for half in keys_values.chunk(2, dim=-1))
    visible_BL = torch.arange(hidden_BLD.size(1), device=hidden_BLD.device) <= answer_B[:, None]
    attended = F.scaled_dot_product_attention(
        query_BH1W, key_BHLW, value_BHLW, attn_mask=visible_BL[:, None, None]
    )
    return after_attention(layer, answer_B1D, attended).squeeze(1)


def projected(layer: nn.TransformerEncoderLayer, hidden_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, B H L W each."""
    attention = layer.self_attn
    query, key, value = F.linear(hidden_BLD, attention.in_proj_weight, attention.in_proj_bias).chunk(
        3, dim=-1
    )
    return by_head(query), by_head(key), by_head(value)


def by_head(rows_BLD: Tensor) -> Tensor:
    """B H L W, a view."""
    result: Tensor = rows_BLD.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
    return result


def after_attention(layer: nn.TransformerEncoderLayer, hidden_BLD: Tensor, attended_BHLW: Tensor) -> Tensor:
    """The rest of an encoder layer: projection, feed-forward, and a norm behind each sum."""
    attended_BLD = attended_BHLW.transpose(1, 2).flatten(-2)
    hidden_BLD = layer.norm1(hidden_BLD + layer.self_attn.out_proj(attended_BLD))
    result: Tensor = layer.norm2(hidden_BLD + layer.linear2(F.gelu(layer.linear1(hidden_BLD))))
    return result


def at_positions(hidden_BLD: Tensor, position_B: Tensor) -> Tensor:
    """One row of each sample: B D."""
    index_B1D = position_B[:, None, None].expand(-1, 1, hidden_BLD.size(-1))
    return hidden_BLD.gather(1, index_B1D).squeeze(1)


def imitation_loss_without_waiting(action_logits: Tensor, type_logits: Tensor, batch: Batch) -> Tensor:
    """`imitation_loss`, but the device counts the samples that have an action, and the host never asks."""
    num_acting = (batch["target_type"] == TRANSITION).sum().clamp(min=1)
    action_loss = F.cross_entropy(
        action_logits, batch["target_action"], ignore_index=NO_ACTION, reduction="sum"
    )
    type_loss = F.cross_entropy(type_logits, batch["target_type"])
    loss: Tensor = TYPE_LOSS_WEIGHT * type_loss + action_loss / num_acting
    return loss
