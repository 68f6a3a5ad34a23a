"""Classify sentences of very different length, batched with their likes."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader

PADDING = 0


def sentences(number, seed=3):
    generator = random.Random(seed)
    made = []
    for _ in range(number):
        length = min(120, 4 + int(generator.expovariate(1 / 20)))
        words = torch.tensor([generator.randrange(1, 2000) for _ in range(length)])
        made.append((words, length % 4))
    return made


class SimilarLengths:
    """Batches of similar length, in random order."""

    def __init__(self, lengths, batch_size):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    def __iter__(self):
        random.shuffle(self.batches)
        yield from self.batches

    def __len__(self):
        return len(self.batches)


def collate(samples):
    words = torch.full((len(samples), max(len(sample[0]) for sample in samples)), PADDING)
    for row, (sentence, _label) in enumerate(samples):
        words[row, : len(sentence)] = sentence  # once per sample, as every collate must
    return words, torch.tensor([sample[1] for sample in samples])


class Classifier(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(2000, width, padding_idx=PADDING)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, words):
        mask = (words != PADDING).unsqueeze(-1)
        hidden = self.mix(self.embed(words)) * mask
        return self.head(hidden.sum(1) / mask.sum(1))


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = sentences(6000)
    batches = SimilarLengths([len(words) for words, _label in data], batch_size=32)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(30):
        for step, (words, labels) in enumerate(loader):
            loss = criterion(model(words.to(device)), labels.to(device))  # also: launch-bound-step on cuda
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                print(f"{epoch}:{step} {loss.item():.3f}", flush=True)


main()
