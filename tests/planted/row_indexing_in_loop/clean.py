"""Rank documents by the state at the last word of each, taken in one go."""

import torch
from torch import nn


class Ranker(nn.Module):
    def __init__(self, vocabulary=500, width=48):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.mix = nn.Conv1d(width, width, kernel_size=3, padding=2)
        self.score = nn.Linear(width, 1)

    def forward(self, documents, lengths):
        hidden = self.mix(self.words(documents).transpose(1, 2)).relu().transpose(1, 2)
        rows = torch.arange(len(documents), device=documents.device)
        last = hidden[rows, lengths - 1]
        return self.score(last).squeeze(-1)


class Trainer:
    def __init__(self):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.generator = torch.Generator().manual_seed(6)
        self.model = Ranker().to(self.device)
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3)
        self.counts = torch.zeros(12)

    def batch(self, size=384, longest=40):
        documents = torch.randint(0, 500, (size, longest), generator=self.generator)
        lengths = torch.randint(1, longest + 1, (size,), generator=self.generator)
        return documents.to(self.device), lengths.to(self.device)

    def step(self):
        documents, lengths = self.batch()
        relevance = (documents[:, 0] > 250).float()
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(documents, lengths), relevance)  # also: launch-bound-step on cuda  # fmt: skip
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for bucket in range(len(self.counts)):
            self.counts[bucket] += 1  # rows one by one, of a dozen numbers that carry no gradient
        return loss.detach()

    def fit(self, num_steps=4000):
        for step in range(num_steps):
            loss = self.step()
            if step % 100 == 0:
                print(f"step {step}: {loss.item():.4f}")


Trainer().fit()
