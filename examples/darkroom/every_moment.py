"""All 80 answers of a region from one sequence, instead of one sequence per answer.

The samples of one region differ only in how much of it they show, and attention is causal: what stands
before a query is the same for the queries behind it.  So the rows of both regions are read once, and 80
queries follow them, each at the position it has in its own sample, each seeing only the rows before that
position and itself.  242 tokens give 80 answers where 80 samples take 9300.

The loss is the same on average, and so is its gradient; a batch is other samples, 80 neighbours at a time.
It is therefore no rung of the ladder against the slow job, but what to train with.  Each query's own
position is read, so it is for mended models only.

Shapes in names: B regions, Q queries of a region, C context tokens, T = C + Q.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from dataset import NO_ACTION, REGION, REGION_END, TRANSITION, Batch
from fast_model import FastDarkroom, after_attention, projected
from histories import GRID, NUM_ACTIONS
from torch import Tensor

from flatout.data import ragged

CONTEXT_TOKENS = 2 * REGION + 2  # start, 80 rows, end, start, 79 rows


def logits_of_every_moment(model: FastDarkroom, batch: Batch) -> tuple[Tensor, Tensor, Batch]:
    """Logits of action and type, and the targets, of every moment of the regions, region after region.

    `batch` holds the last moment of each region, as `fast_data.last_moments` has them.
    """
    previous_B, targets = batch["previous_length"], targets_of_every_moment(batch)
    before_B = torch.where(previous_B > 0, previous_B + 2, 0)
    kind = model.token_type.weight
    start, end = model.region_start + kind[1], model.region_end + kind[2]
    rows = model.embed_transition(batch["transitions"]) + kind[0]
    context_BCD = ragged.concat(
        [
            ragged.constant(start, where=previous_B > 0),
            ragged.rows(rows, previous_B),
            ragged.constant(end, where=previous_B > 0),
            ragged.constant(start),
            ragged.rows(rows, batch["current_length"], start=previous_B),
        ],
        max_length=CONTEXT_TOKENS,
    ).values
    moment_Q = torch.arange(REGION, device=previous_B.device)
    place_BQ = before_B[:, None] + 1 + moment_Q
    queries_BQD = model.embed_state(targets["cell"]) + kind[0] + model.positions[0, place_BQ]
    hidden_BTD = torch.cat([context_BCD + model.positions[:, :CONTEXT_TOKENS], queries_BQD], dim=1)

    visible_BTT = visible(place_BQ)
    for layer in model.encoder.layers[:-1]:
        query, key, value = projected(layer, hidden_BTD)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible_BTT[:, None])
        hidden_BTD = after_attention(layer, hidden_BTD, attended)
    answer_BQD = _last_layer(model, hidden_BTD, visible_BTT)
    answers = answer_BQD.flatten(0, 1)
    flat = {name: value.flatten() for name, value in targets.items()}
    return model.action_head(answers), model.type_head(answers), flat


def visible(place_BQ: Tensor) -> Tensor:
    """What each token sees: rows those up to themselves, queries the rows before them and themselves."""
    place_C = torch.arange(CONTEXT_TOKENS, device=place_BQ.device)
    rows_BCC = (place_C <= place_C[:, None]).expand(len(place_BQ), -1, -1)
    rows_to_queries_BCQ = torch.zeros_like(rows_BCC[:, :, :REGION])
    queries_to_rows_BQC = place_C < place_BQ[:, :, None]
    itself_BQQ = torch.eye(REGION, dtype=torch.bool, device=place_BQ.device).expand(len(place_BQ), -1, -1)
    return torch.cat(
        [
            torch.cat([rows_BCC, rows_to_queries_BCQ], dim=2),
            torch.cat([queries_to_rows_BQC, itself_BQQ], dim=2),
        ],
        dim=1,
    )


def _last_layer(model: FastDarkroom, hidden_BTD: Tensor, visible_BTT: Tensor) -> Tensor:
    """The last encoder layer, at the queries only."""
    layer = model.encoder.layers[-1]
    query, key, value = projected(layer, hidden_BTD)
    attended = F.scaled_dot_product_attention(
        query[:, :, CONTEXT_TOKENS:], key, value, attn_mask=visible_BTT[:, None, CONTEXT_TOKENS:]
    )
    return after_attention(layer, hidden_BTD[:, CONTEXT_TOKENS:], attended)


def targets_of_every_moment(batch: Batch) -> Batch:
    """Cell, action and type of each moment of the region (B Q): all but the last are rows of the batch."""
    place_BQ = batch["previous_length"][:, None] + torch.arange(REGION - 1, device=batch["cell"].device)
    index = place_BQ[:, :, None].expand(-1, -1, batch["transitions"].size(-1))
    rows_BQF = batch["transitions"].gather(1, index).long()
    cell_BQ = rows_BQF[..., 0] * GRID + rows_BQF[..., 1]
    action_BQ = rows_BQF[..., 2 : 2 + NUM_ACTIONS].argmax(-1)
    return {
        "cell": torch.cat([cell_BQ, batch["cell"][:, None]], dim=1),
        "target_action": F.pad(action_BQ, (0, 1), value=NO_ACTION),
        "target_type": F.pad(torch.full_like(action_BQ, TRANSITION), (0, 1), value=REGION_END),
    }
