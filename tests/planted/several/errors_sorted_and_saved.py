"""Sort the errors into a histogram one by one in every step, and write the whole model every twenty steps."""

import torch
from torch import nn

NUM_BINS = 10


def note_errors(histogram, errors):
    for error in errors.tolist():  # guilty: costly-block, largest
        position = min(int(abs(error) * NUM_BINS), NUM_BINS - 1)
        histogram[position] += 1


def main():
    torch.manual_seed(43)
    words = nn.Embedding(200_000, 64).requires_grad_(False)
    model = nn.Sequential(words, nn.Flatten(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    histogram = [0] * NUM_BINS
    for step in range(1, 100_000):
        tokens, targets = torch.randint(200_000, (16384, 1)), torch.randn(16384)
        errors = model(tokens).squeeze(1) - targets
        optimizer.zero_grad()
        errors.square().mean().backward()
        optimizer.step()
        note_errors(histogram, errors.detach())
        if step % 20 == 0:
            torch.save(model.state_dict(), "last.pt")  # guilty: blocking-checkpoint


if __name__ == "__main__":
    main()
