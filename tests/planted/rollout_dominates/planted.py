"""A policy that plays one simulated game after another, then learns from them in eight short steps."""

import torch
from torch import nn

NUM_GAMES, NUM_MOVES = 16, 50


class Game:
    """A point that is to be steered to the origin."""

    def __init__(self, seed: int) -> None:
        self.position = torch.randn(4, generator=torch.Generator().manual_seed(seed))

    def move(self, direction: int) -> float:
        self.position = 0.95 * self.position + 0.1 * (direction - 1)
        return -float(self.position.norm())


@torch.no_grad()
def play(policy: nn.Module, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    game = Game(seed)
    seen, moves, rewards = [], [], []
    for _ in range(NUM_MOVES):
        seen.append(game.position)
        moves.append(int(torch.multinomial(policy(game.position).softmax(-1), 1)))
        rewards.append(game.move(moves[-1]))
    return torch.stack(seen), torch.tensor(moves), torch.tensor(rewards)


def train(num_rounds: int) -> None:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 768), nn.Tanh(), nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for number in range(num_rounds):
        games = [play(policy, number * NUM_GAMES + game) for game in range(NUM_GAMES)]  # guilty
        seen, moves, rewards = (torch.cat(part) for part in zip(*games, strict=True))
        for _ in range(8):
            chosen = policy(seen).log_softmax(-1).gather(1, moves[:, None]).squeeze(1)
            loss = -(chosen * (rewards - rewards.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    train(num_rounds=500)
