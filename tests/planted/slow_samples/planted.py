"""Classify documents whose words are counted one by one when a sample is fetched."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_WORDS = 64


class Documents(Dataset):
    def __init__(self, number=1024, length=600):
        rng = np.random.default_rng(4)
        self.documents = rng.integers(0, NUM_WORDS, (number, length))

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        words = self.documents[index].tolist()
        counts = [float(words.count(word)) for word in range(NUM_WORDS)]  # guilty, largest
        return torch.tensor(counts), index % 4


def main():
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Linear(NUM_WORDS, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Documents(), batch_size=16, shuffle=True)  # also: single-process-loading, largest
    for epoch in range(500):
        for counts, labels in loader:
            loss = nn.functional.cross_entropy(model(counts), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
