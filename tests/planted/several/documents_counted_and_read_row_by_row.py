"""Rank documents whose words are counted one by one, by states that are read one by one."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_WORDS = 32


class Documents(Dataset):
    def __init__(self, number=2048, length=120):
        self.documents = np.random.default_rng(41).integers(0, NUM_WORDS, (number, length))

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        words = self.documents[index].tolist()
        counts = [float(words.count(word)) for word in range(NUM_WORDS)]  # guilty: slow-samples, largest
        return torch.tensor(counts), index % 4


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.states, self.score = nn.Linear(NUM_WORDS, 4 * 32), nn.Linear(32, 1)

    def forward(self, counts, kinds):
        states = self.states(counts).view(len(counts), 4, 32)
        own = []
        for row, kind in enumerate(kinds):
            own.append(states[row, kind])  # guilty: row-indexing-in-loop
        return self.score(torch.stack(own)).squeeze(1)


def main():
    torch.manual_seed(41)
    model = Ranker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Documents(), batch_size=64, shuffle=True)  # also: single-process-loading
    for epoch in range(500):
        for counts, kinds in loader:
            loss = model(counts, kinds.tolist()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
