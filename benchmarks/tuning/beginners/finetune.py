"""A classifier of MiniLM's size that is tuned on sentences, which are cut into tokens one by one.

    python finetune.py [--size small|full] [--steps N] [--by-hand]

As a beginner writes it.  Sentences are made up, and weights random.  `--by-hand` adds what most guides name
first: torch.compile and 16-bit autocast.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SIZES = {
    "small": {
        "sentences": 512,
        "words": 2000,
        "length": 32,
        "width": 48,
        "heads": 4,
        "layers": 2,
        "batch": 8,
    },
    "full": {
        "sentences": 8192,
        "words": 30522,
        "length": 128,
        "width": 384,
        "heads": 12,
        "layers": 6,
        "batch": 64,
    },
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Sentences(Dataset[tuple[Tensor, Tensor, int]]):
    def __init__(self, count: int, words: int, length: int) -> None:
        chance = random.Random(0)
        known = ["".join(chance.choices(LETTERS, k=chance.randint(2, 9))) for _ in range(words - 3)]
        self.number = {word: number + 3 for number, word in enumerate(known)}
        self.length = length
        self.labels = [chance.randint(0, 1) for _ in range(count)]
        self.texts = []
        for label in self.labels:
            half = known[: len(known) // 2] if label else known  # something to learn
            self.texts.append(" ".join(chance.choices(half, k=chance.randint(length // 4, length - 2))))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        words = re.findall(r"\w+|[^\w\s]", self.texts[index].lower())
        numbers = [1, *(self.number.get(word, 2) for word in words)][: self.length]
        padding = [0] * (self.length - len(numbers))
        mask = torch.tensor([False] * len(numbers) + [True] * len(padding))
        return torch.tensor(numbers + padding), mask, self.labels[index]


class Classifier(nn.Module):
    def __init__(self, words: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--by-hand", action="store_true")
    options = parser.parse_args()
    size = dict(SIZES[options.size])
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = Sentences(size.pop("sentences"), size["words"], size["length"])
    loader = DataLoader(data, batch_size=size.pop("batch"), shuffle=True, drop_last=True)
    model = Classifier(**size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    call = torch.compile(model) if options.by_hand else model
    step, total = 0, 0.0
    while step < options.steps:
        for tokens, padding, labels in loader:
            half = torch.autocast(device, torch.bfloat16) if options.by_hand else contextlib.nullcontext()
            with half:
                logits = call(tokens.to(device), padding.to(device))
                loss = nn.functional.cross_entropy(logits, labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            total += loss.item()
            if step % 100 == 0:
                print(step, total / step)
            if step >= options.steps:
                break


if __name__ == "__main__":
    main()
