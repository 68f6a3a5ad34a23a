"""Predict the value of a board from the kinds of its pieces."""

import argparse
import random

import torch
import torch.nn as nn

KINDS = 13


class BoardValue(nn.Module):
    def __init__(self, width, device):
        super().__init__()
        self.device = device
        self.kind = nn.Embedding(KINDS, width)
        self.body = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)])
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def embed(self, boards):
        return self.kind(torch.tensor(boards, device=self.device))

    def forward(self, boards):
        hidden = self.embed(boards)
        for layer in self.body:
            # A creation in a loop, but six of them, each as large as the work around it.
            noise = torch.zeros_like(hidden)
            hidden = hidden + torch.relu(layer(hidden + noise))
        return self.head(hidden.sum(dim=1)).squeeze(-1)


def random_boards(number, rng):
    boards = [[rng.randrange(KINDS) for _ in range(24)] for _ in range(number)]
    values = [sum(1 if kind > 6 else -1 for kind in board if kind) / 24 for board in boards]
    return boards, values


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rng = random.Random(5)
    model = BoardValue(args.width, device).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(args.steps):
        boards, values = random_boards(96, rng)
        loss = nn.functional.mse_loss(model(boards), torch.tensor(values, device=device))  # also: launch-bound-step on cuda  # fmt: skip
        # A dozen scalars on the host, some microseconds of the whole step.
        running = {name: torch.tensor(0.0) for name in "abcdefghijkl"}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(step, loss.item(), len(running))


if __name__ == "__main__":
    main()
