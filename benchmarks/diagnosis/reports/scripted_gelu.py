"""Train a compiled transformer whose activation was fused by torch.jit.script.

Report: karpathy/nanoGPT commit 177d5f7d, removed because it breaks the graphs of torch.compile ("massive").
There a function was decorated, which torch.compile of today inlines; a scripted module still ends its graph.
"""

import argparse
import math

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mended", action="store_true")
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIM, LAYERS, BATCH, LENGTH = (512, 4, 16, 256) if device.type == "cuda" else (64, 4, 4, 64)


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gelu = NewGELU() if args.mended else torch.jit.script(NewGELU())

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, -1, 32).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(self.gelu(self.up(self.norm2(x))))  # guilty: graph-breaks


class Model(nn.Module):
    def __init__(self, words=256):
        super().__init__()
        self.words, self.blocks = nn.Embedding(words, DIM), nn.ModuleList(Block(DIM) for _ in range(LAYERS))
        self.head = nn.Linear(DIM, words)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    torch.manual_seed(0)
    model = Model().to(device)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    corpus = torch.randint(0, 256, (1_000_000,), device=device)
    for step in range(100_000):
        starts = torch.randint(0, len(corpus) - LENGTH - 1, (BATCH,), device=device)
        chosen = corpus[starts[:, None] + torch.arange(LENGTH + 1, device=device)]
        logits = compiled(chosen[:, :-1])  # also: launch-bound-step on cuda
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
