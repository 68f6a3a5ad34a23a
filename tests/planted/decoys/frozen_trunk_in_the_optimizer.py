"""A head on a frozen trunk, all of whose parameters the optimizer was given: they ask for no gradient."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
        self.trunk.requires_grad_(False)
        self.head = nn.Linear(1024, 10)

    def forward(self, x):  # decoy: dead-parameters
        return self.head(self.trunk(x))


def main():
    torch.manual_seed(26)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(512, 128), torch.randint(0, 10, (512,))
    for step in range(50_000):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
