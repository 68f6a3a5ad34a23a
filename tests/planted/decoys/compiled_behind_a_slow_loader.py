"""A compiled model of two graphs in a job that waits for its data: one graph would wait as long."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Store(Dataset):
    """A dataset that is asked for whole batches, and waits for storage."""

    def __init__(self, number=32768):
        self.readings = torch.randn(number, 32)

    def __len__(self):
        return len(self.readings)

    def __getitems__(self, indices):
        time.sleep(0.02)  # also: slow-samples
        return self.readings[indices]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 1)

    def forward(self, x):
        hidden = self.first(x).relu()
        torch._dynamo.graph_break()  # decoy: graph-breaks  # also: compile-not-amortised
        return self.second(hidden)


def main():
    torch.manual_seed(39)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(  # guilty: loader-bound
        Store(), batch_size=128, shuffle=True, num_workers=1, persistent_workers=True, collate_fn=lambda x: x
    )
    model = torch.compile(Model().to(device), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _epoch in range(1000):
        for readings in loader:
            loss = model(readings.to(device)).square().mean()  # decoy: launch-bound-step
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
