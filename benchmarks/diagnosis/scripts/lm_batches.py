"""Train a small GPT on made-up tokens, with batches cut out of one long array."""

import argparse
import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--block-size", type=int, default=64)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--max-iters", type=int, default=100_000)
parser.add_argument("--eval-interval", type=int, default=25)
parser.add_argument("--eval-iters", type=int, default=20)
parser.add_argument("--mended", choices=["evaluation", "attention"])
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 512
rng = np.random.default_rng(0)
data = {
    name: rng.integers(0, VOCAB, size, dtype=np.uint16)
    for name, size in (("train", 1_000_000), ("val", 100_000))
}


def get_batch(split):
    source = data[split]
    ix = torch.randint(len(source) - args.block_size, (args.batch_size,))
    x = torch.stack([torch.from_numpy(source[i : i + args.block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(source[i + 1 : i + 1 + args.block_size].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.tril(torch.ones(args.block_size, args.block_size)))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(C, dim=2)
        )
        if args.mended == "attention":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            att = att.masked_fill(self.mask[:T, :T] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, args.dim)
        self.positions = nn.Embedding(args.block_size, args.dim)
        self.blocks = nn.Sequential(*(Block(args.dim, args.heads) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, VOCAB, bias=False)

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.positions(torch.arange(idx.size(1), device=idx.device))
        logits = self.head(self.norm(self.blocks(x)))
        return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


torch.manual_seed(1337)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {}
    for split in ("train", "val"):
        losses = torch.zeros(args.eval_iters)
        for k in range(args.eval_iters):
            _, loss = model(*get_batch(split))
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < 100:
        return 1e-3 * (it + 1) / 100
    return 1e-4 + 0.5 * (1 + math.cos(math.pi * min(1.0, it / 5000))) * 9e-4


eval_interval = args.eval_interval * (20 if args.mended == "evaluation" else 1)
t0 = time.time()
for iter_num in range(args.max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
    xb, yb = get_batch("train")
    _, loss = model(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if iter_num % 10 == 0:
        t1 = time.time()
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {(t1 - t0) * 1000:.2f}ms")
        t0 = t1
