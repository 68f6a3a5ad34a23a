"""A transformer that continues a learning history: given past regions and a state, the next action.

Each transition becomes one token.  A region stands between a start token and an end token, and the
query state is the last token of the sequence:

    start, previous region (80), end, start, current region (0 to 79), query

Samples without a previous region begin at the second start.  Shapes in comments: B samples, N context
rows, L tokens, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from dataset import REGION, TRANSITION, Batch
from histories import GRID, NUM_ACTIONS
from torch import Tensor, nn

WIDTH = 64
NUM_TYPES = 3
TRANSITION_WIDTH = 2 + NUM_ACTIONS + 1 + 2  # state, one-hot action, reward, next state
MAX_TOKENS = 4 * (REGION + 2)  # room for four regions with their start and end
TYPE_LOSS_WEIGHT = 0.1


class DarkroomTransformer(nn.Module):
    """4 layers of width 64, 4 heads; two heads on top, for the action and for the type of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_transition = nn.Linear(TRANSITION_WIDTH, WIDTH)
        self.embed_state = nn.Embedding(GRID * GRID, WIDTH)
        self.token_type = nn.Embedding(NUM_TYPES, WIDTH)
        self.region_start = nn.Parameter(torch.randn(1, WIDTH) * 0.02)
        self.region_end = nn.Parameter(torch.randn(1, WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, MAX_TOKENS, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.action_head = nn.Linear(WIDTH, NUM_ACTIONS)
        self.type_head = nn.Linear(WIDTH, NUM_TYPES)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits of the action (B, 5) and of the token type (B, 3) that follow the query."""
        device = self.positions.device
        transitions = torch.cat(
            [batch["states"], batch["actions"], batch["rewards"].unsqueeze(-1), batch["next_states"]], dim=-1
        )
        context = self.embed_transition(transitions)  # B N D
        cells = (batch["query"] * torch.tensor([GRID, 1], device=device)).sum(-1)
        query = self.embed_state(cells).unsqueeze(1)  # B 1 D
        tokens = self.build_sequence(context, query, batch["previous_length"], batch["current_length"])
        length = tokens.size(1)
        mask = torch.triu(torch.full((length, length), float("-inf")), diagonal=1).to(device)
        hidden = self.encoder(tokens + self.positions[:, :length], mask=mask)
        answer = hidden[:, -1]
        return self.action_head(answer), self.type_head(answer)

    # A hot statement stays on one line, so that one line number names it.
    # fmt: off
    # ruff: disable[E501]
    def build_sequence(
        self, context: Tensor, query: Tensor, previous_length: list[int], current_length: list[int]
    ) -> Tensor:
        """Tokens of every sample, padded with zeros at the end to the longest one: B L D."""
        device = context.device
        sequences = []
        for b in range(context.size(0)):
            seq = []
            if previous_length[b] > 0:
                seq.append(self.region_start + self.token_type(torch.tensor([1], device=device)))
                for t in range(previous_length[b]):
                    seq.append(context[b, t] + self.token_type(torch.tensor([0], device=device)))  # guilty: row-indexing-in-loop, tensor-created-in-loop
                seq.append(self.region_end + self.token_type(torch.tensor([2], device=device)))
            seq.append(self.region_start + self.token_type(torch.tensor([1], device=device)))
            for t in range(previous_length[b], previous_length[b] + current_length[b]):
                seq.append(context[b, t] + self.token_type(torch.tensor([0], device=device)))  # guilty: row-indexing-in-loop, tensor-created-in-loop
            seq.append(query[b] + self.token_type(torch.tensor([0], device=device)))
            sequences.append(torch.cat(seq, dim=0))
        longest = max(sequence.size(0) for sequence in sequences)
        padded = []
        for sequence in sequences:
            if sequence.size(0) < longest:
                padding = torch.zeros(longest - sequence.size(0), sequence.size(1), device=device)
                sequence = torch.cat([sequence, padding], dim=0)
            padded.append(sequence)
        return torch.stack(padded)
    # ruff: enable[E501]
    # fmt: on


def imitation_loss(action_logits: Tensor, type_logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of the learner's action where there is one, plus a little for the token type."""
    acts = batch["target_type"] == TRANSITION
    loss = TYPE_LOSS_WEIGHT * F.cross_entropy(type_logits, batch["target_type"])
    if acts.any():
        loss = loss + F.cross_entropy(action_logits[acts], batch["target_action"][acts])
    return loss
