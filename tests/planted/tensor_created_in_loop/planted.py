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
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def embed(self, boards):
        pieces = []
        for board in boards:
            for kind in board:
                index = torch.tensor([kind], device=self.device)  # guilty
                pieces.append(self.kind(index))
        return torch.cat(pieces).view(len(boards), -1, self.kind.embedding_dim)

    def forward(self, boards):
        return self.head(self.embed(boards).sum(dim=1)).squeeze(-1)


def random_boards(number, rng):
    boards = [[rng.randrange(KINDS) for _ in range(24)] for _ in range(number)]
    values = [sum(1 if kind > 6 else -1 for kind in board if kind) / 24 for board in boards]
    return boards, values


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rng = random.Random(5)
    model = BoardValue(args.width, device).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(args.steps):
        boards, values = random_boards(24, rng)
        loss = nn.functional.mse_loss(model(boards), torch.tensor(values, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
