"""Embed every piece of a board by itself, and evaluate all held-out boards every ten steps."""

import torch
from torch import nn
from torch.utils.data import DataLoader

KINDS = 13


class BoardValue(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.kind, self.head = nn.Embedding(KINDS, width), nn.Linear(width, 1)

    def forward(self, boards):
        pieces = []
        for kind in boards.flatten().tolist():
            index = torch.tensor([kind])  # guilty: tensor-created-in-loop
            pieces.append(self.kind(index))
        return self.head(torch.cat(pieces).view(*boards.shape, -1).sum(1)).squeeze(1)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    error = sum((model(boards) - values).abs().mean().item() for boards, values in loader)
    model.train()
    return error / len(loader)


def batches(number):
    return DataLoader(
        [(torch.randint(KINDS, (16, 12)), torch.randn(16)) for _ in range(number)], batch_size=None
    )


def main():
    torch.manual_seed(44)
    model, loader, held_out = BoardValue(), batches(50), batches(90)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = 0
    for _epoch in range(500):
        for boards, values in loader:
            loss = nn.functional.mse_loss(model(boards), values)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                evaluate(model, held_out)  # guilty: evaluation-dominates, largest


if __name__ == "__main__":
    main()
