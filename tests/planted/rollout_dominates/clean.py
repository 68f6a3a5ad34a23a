"""A policy that plays all simulated games at once, then learns from them in eight short steps."""

import torch
from torch import nn

NUM_GAMES, NUM_MOVES = 16, 50


class Games:
    """Points that are to be steered to the origin."""

    def __init__(self, seed: int) -> None:
        self.positions = torch.randn(NUM_GAMES, 4, generator=torch.Generator().manual_seed(seed))

    def move(self, directions: torch.Tensor) -> torch.Tensor:
        self.positions = 0.95 * self.positions + 0.1 * (directions[:, None] - 1)
        return -self.positions.norm(dim=1)


@torch.no_grad()
def play(policy: nn.Module, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    games = Games(seed)
    seen, moves, rewards = [], [], []
    for _ in range(NUM_MOVES):
        seen.append(games.positions)
        moves.append(torch.multinomial(policy(games.positions).softmax(-1), 1).squeeze(1))
        rewards.append(games.move(moves[-1]))
    return torch.cat(seen), torch.cat(moves), torch.cat(rewards)


def train(num_rounds: int) -> None:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 768), nn.Tanh(), nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for number in range(num_rounds):
        seen, moves, rewards = play(policy, number)
        for _ in range(8):
            chosen = policy(seen).log_softmax(-1).gather(1, moves[:, None]).squeeze(1)
            loss = -(chosen * (rewards - rewards.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    train(num_rounds=500)
