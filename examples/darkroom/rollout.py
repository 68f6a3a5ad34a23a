"""Acting in many Darkrooms at once, with a context that grows as it did in training.

The agent sees what a training sample holds: the previous region of 80 transitions, the current region so
far, and its own cell.  From one step to the next that sequence grows by one transition, so the keys and
values of everything before it are kept: a step costs two tokens per environment, the last transition and
the query, instead of up to 163.  Every 80 steps the current region becomes the previous one, the positions
shift, and the context is read again.

Shapes in names: E environments, T tokens, L tokens of the context, D width, H heads, W width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from dataset import REGION
from fast_model import MOST_TOKENS_BESIDE_ROWS, NUM_HEADS, FastDarkroom, after_attention, projected
from histories import EPISODE_STEPS, GRID, MOVES, NUM_ACTIONS, START
from model import WIDTH
from torch import Tensor

LONGEST = 2 * REGION - 1 + MOST_TOKENS_BESIDE_ROWS  # tokens of the longest training sample


class Darkrooms:
    """One grid world per goal, all stepped together."""

    def __init__(self, goals_E2: Tensor) -> None:
        self.goals_E2 = goals_E2.long()
        self._moves = torch.from_numpy(MOVES).long().to(goals_E2.device)
        self.cells_E2 = self._middle()

    def begin_episode(self) -> None:
        self.cells_E2 = self._middle()

    def step(self, actions_E: Tensor) -> tuple[Tensor, Tensor]:
        """Move; the transitions as the model reads them (E, 10), and the rewards (E)."""
        before_E2 = self.cells_E2
        self.cells_E2 = (before_E2 + self._moves[actions_E]).clamp(0, GRID - 1)
        rewards_E = (self.cells_E2 == self.goals_E2).all(-1).float()
        transition = [
            before_E2.float(),
            F.one_hot(actions_E, NUM_ACTIONS).float(),
            rewards_E.unsqueeze(-1),
            self.cells_E2.float(),
        ]
        return torch.cat(transition, dim=-1), rewards_E

    def _middle(self) -> Tensor:
        return torch.full_like(self.goals_E2, START)


class Context:
    """Keys and values of the tokens seen so far, for every layer."""

    def __init__(self, model: FastDarkroom, *, num_environments: int) -> None:
        self._model = model
        shape = (len(model.encoder.layers), num_environments, NUM_HEADS, LONGEST, WIDTH // NUM_HEADS)
        self._keys = torch.zeros(shape, device=model.positions.device)
        self._values = torch.zeros_like(self._keys)
        self.length = 0

    def clear(self) -> None:
        self.length = 0

    def extend(self, tokens_ETD: Tensor, *, keep: int) -> Tensor:
        """The last layer's rows for tokens behind the context; the first `keep` of them join it."""
        num_read = self.length + tokens_ETD.size(1)
        new = slice(self.length, num_read)
        hidden_ETD = tokens_ETD + self._model.positions[:, new]
        place_L = torch.arange(num_read, device=tokens_ETD.device)
        visible_TL = place_L <= place_L[new, None]
        for number, layer in enumerate(self._model.encoder.layers):
            query, key, value = projected(layer, hidden_ETD)
            self._keys[number, :, :, new], self._values[number, :, :, new] = key, value
            attended = F.scaled_dot_product_attention(
                query,
                self._keys[number, :, :, :num_read],
                self._values[number, :, :, :num_read],
                attn_mask=visible_TL,
            )
            hidden_ETD = after_attention(layer, hidden_ETD, attended)
        self.length += keep
        return hidden_ETD


class InContextActor:
    """The model as an agent: what it saw is all it learns from, its weights do not change."""

    def __init__(self, model: FastDarkroom, *, num_environments: int) -> None:
        self._model = model
        self._context = Context(model, num_environments=num_environments)
        self._region: list[Tensor] = []  # transitions of the current region, (E, 10) each
        self._unread_ETD: Tensor = self._start_of(num_environments)

    def logits(self, cells_E2: Tensor) -> Tensor:
        """Logits of the next action in each environment: E 5."""
        model = self._model
        cell_E1 = (cells_E2 * model.grid_strides).sum(-1, keepdim=True)
        query_E1D = model.embed_state(cell_E1) + model.token_type.weight[0]
        tokens_ETD = torch.cat([self._unread_ETD, query_E1D], dim=1)
        keep = self._unread_ETD.size(1)
        if not model.mend:
            # the heads of such a model were trained on the padding of the longest sample
            num_padding = LONGEST - self._context.length - tokens_ETD.size(1)
            tokens_ETD = F.pad(tokens_ETD, (0, 0, 0, num_padding))
        answer_ED = self._context.extend(tokens_ETD, keep=keep)[:, -1]
        self._unread_ETD = self._unread_ETD[:, :0]
        result: Tensor = model.action_head(answer_ED)
        return result

    def remember(self, transition_EF: Tensor) -> None:
        """Add what the last action led to."""
        model = self._model
        self._region.append(transition_EF)
        if len(self._region) < REGION:
            token_ED = model.embed_transition(transition_EF) + model.token_type.weight[0]
            self._unread_ETD = torch.cat([self._unread_ETD, token_ED.unsqueeze(1)], dim=1)
            return
        rows_ETD = model.embed_transition(torch.stack(self._region, dim=1)) + model.token_type.weight[0]
        start_E1D = self._start_of(len(transition_EF))
        end_E1D = (model.region_end + model.token_type.weight[2]).expand_as(start_E1D)
        self._unread_ETD = torch.cat([start_E1D, rows_ETD, end_E1D, start_E1D], dim=1)
        self._region = []
        self._context.clear()

    def _start_of(self, num_environments: int) -> Tensor:
        token = self._model.region_start + self._model.token_type.weight[1]
        return token.expand(num_environments, 1, -1)


@torch.no_grad()
def returns_by_episode(
    model: FastDarkroom, goals_E2: Tensor, *, num_episodes: int, seed: int, temperature: float = 1.0
) -> Tensor:
    """The reward of each episode of a stream, for one environment per goal: E episodes."""
    generator = torch.Generator(goals_E2.device).manual_seed(seed)
    rooms = Darkrooms(goals_E2)
    actor = InContextActor(model, num_environments=len(goals_E2))
    returns = torch.zeros(len(goals_E2), num_episodes, device=goals_E2.device)
    for episode in range(num_episodes):
        rooms.begin_episode()
        for _ in range(EPISODE_STEPS):
            chances = (actor.logits(rooms.cells_E2) / temperature).softmax(-1)
            actions_E = torch.multinomial(chances, 1, generator=generator).squeeze(1)
            transition_EF, rewards_E = rooms.step(actions_E)
            actor.remember(transition_EF)
            returns[:, episode] += rewards_E
    return returns


def random_returns(goals_E2: Tensor, *, num_episodes: int, seed: int) -> Tensor:
    """The same stream for an agent that acts at random: E episodes."""
    generator = torch.Generator(goals_E2.device).manual_seed(seed)
    rooms = Darkrooms(goals_E2)
    returns = torch.zeros(len(goals_E2), num_episodes, device=goals_E2.device)
    for episode in range(num_episodes):
        rooms.begin_episode()
        for _ in range(EPISODE_STEPS):
            shape = (len(goals_E2),)
            actions_E = torch.randint(NUM_ACTIONS, shape, generator=generator, device=goals_E2.device)
            returns[:, episode] += rooms.step(actions_E)[1]
    return returns


def optimal_returns(goals_E2: Tensor) -> Tensor:
    """What an agent that knows the goal earns in an episode: it pays from the step that reaches it (E)."""
    distance_E = (goals_E2.long() - START).abs().sum(-1)
    return (EPISODE_STEPS + 1 - distance_E.clamp(min=1)).float()
