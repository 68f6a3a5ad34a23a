"""Read a sequence with a recurrent cell, and follow the weights of many small heads one by one."""

import copy

import torch
from torch import nn


class Recogniser(nn.Module):
    def __init__(self, hidden=64, num_heads=160):
        super().__init__()
        self.hidden, self.cell = hidden, nn.LSTMCell(24, hidden)
        self.heads = nn.ModuleList(nn.Linear(hidden, 4, bias=False) for _ in range(num_heads))

    def forward(self, frames):
        h = frames.new_zeros(len(frames), self.hidden)
        c = torch.zeros_like(h)
        for frame in frames.unbind(1):
            h, c = self.cell(frame, (h, c))  # guilty: recurrent-cell-loop, largest
        weights = torch.stack([head.weight for head in self.heads])
        return torch.einsum("bh,koh->bko", h, weights)


@torch.no_grad()
def follow(average, model):
    for kept, new in zip(average.parameters(), model.parameters()):  # guilty: per-parameter-python-loop
        kept.mul_(0.99).add_(new, alpha=0.01)


def main():
    torch.manual_seed(46)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Recogniser().to(device)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    frames = torch.randn(1024, 20, 24, device=device)
    for step in range(50_000):
        chosen = frames[torch.randint(0, len(frames), (16,), device=device)]
        loss = model(chosen).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(average, model)
        if step % 200 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
