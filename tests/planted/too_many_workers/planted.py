"""Predict the outcome of games from records that eight workers send."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIELDS = [f"field {number}" for number in range(24)]


class Games(Dataset):
    """Records by name, as a table was read."""

    def __init__(self, number=20_000):
        numbers = random.Random(6)
        self.games = [{name: numbers.random() for name in FIELDS} for _ in range(number)]

    def __len__(self):
        return len(self.games)

    def __getitem__(self, index):
        return self.games[index]


def main():
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(len(FIELDS) - 1, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(  # guilty
        Games(), batch_size=32, shuffle=True, num_workers=8, persistent_workers=True
    )
    for epoch in range(1000):
        for batch in loader:
            table = torch.stack(list(batch.values()), dim=1).float()
            loss = (model(table[:, 1:]).squeeze(1) - table[:, 0]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
