"""A language model of GPT-2 small's size with attention written out, as a beginner writes it.

    python gpt.py [--size small|full] [--steps N] [--by-hand]

Tokens are made up.  `--by-hand` adds what most guides name first: torch.compile and 16-bit autocast.
"""

from __future__ import annotations

import argparse
import contextlib
import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SIZES = {
    "small": {
        "tokens": 20_000,
        "words": 512,
        "context": 32,
        "width": 32,
        "heads": 4,
        "layers": 2,
        "batch": 4,
    },
    "full": {
        "tokens": 2_000_000,
        "words": 50257,
        "context": 1024,
        "width": 768,
        "heads": 12,
        "layers": 12,
        "batch": 8,
    },
}


class Text(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int, words: int, context: int) -> None:
        steps = torch.randint(1, 50, (count,))
        self.tokens = steps.cumsum(0) % words  # something to learn
        self.context = context

    def __len__(self) -> int:
        return len(self.tokens) - self.context - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.tokens[index : index + self.context + 1]
        return piece[:-1], piece[1:]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(context, context)))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Model(nn.Module):
    def __init__(self, words: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList([Layer(width, heads, context) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                nn.init.normal_(part.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--by-hand", action="store_true")
    options = parser.parse_args()
    size = dict(SIZES[options.size])
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = Text(size.pop("tokens"), size["words"], size["context"])
    loader = DataLoader(data, batch_size=size.pop("batch"), shuffle=True, drop_last=True)
    with torch.device(device):
        model = Model(**size)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    call = torch.compile(model) if options.by_hand else model
    step, total = 0, 0.0
    while step < options.steps:
        for tokens, targets in loader:
            tokens, targets = tokens.to(device), targets.to(device)
            half = torch.autocast(device, torch.bfloat16) if options.by_hand else contextlib.nullcontext()
            with half:
                logits = call(tokens)
                loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
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
