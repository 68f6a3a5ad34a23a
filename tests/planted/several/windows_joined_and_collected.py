"""Join the windows of a batch one after the other, and collect garbage after each step."""

import gc

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, number=4096):
        self.windows = np.random.default_rng(47).standard_normal((number, 64, 32), dtype=np.float32)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return self.windows[index]


def collate(windows):
    batch = np.zeros((0, *windows[0].shape), dtype=np.float32)
    for window in windows:
        batch = np.concatenate([batch, window[None]])  # guilty: concatenating-collate, largest
    return torch.from_numpy(batch)


def table():
    return [{"name": str(number), "parents": [number // 2]} for number in range(30_000)]


def main():
    torch.manual_seed(47)
    names = []
    model = nn.Sequential(nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    windows = Windows()
    loader = DataLoader(windows, 256, shuffle=True, collate_fn=collate)  # also: single-process-loading
    for epoch in range(500):
        for batch in loader:
            loss = (model(batch[:, :-1]) - batch[:, 1:]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not names:
                gc.freeze()  # what was imported by then
                names = table()
            gc.collect()  # guilty: garbage-collector-pauses
        print(epoch, loss.item(), len(names))


if __name__ == "__main__":
    main()
