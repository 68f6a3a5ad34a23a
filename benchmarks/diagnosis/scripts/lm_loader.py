"""Train a small transformer on made-up sentences of many lengths, with a DataLoader."""

import argparse
import math
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--max-length", type=int, default=96)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--mended", choices=["unbucketed-padding", "tokenizing", "concatenating-collate"])
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = ["<pad>", "<bos>", "<unk>", *(f"w{i}" for i in range(1000))]
word_to_id = {word: i for i, word in enumerate(VOCAB)}


def make_sentences(num):
    rng = random.Random(0)
    sentences = []
    for _ in range(num):
        length = max(4, min(args.max_length - 1, int(rng.lognormvariate(2.8, 0.6))))
        sentences.append(" ".join(f"w{rng.randrange(1000)}" for _ in range(length)))
    return sentences


def encode(sentence):
    ids = [word_to_id["<bos>"]]
    for word in sentence.lower().split():
        ids.append(word_to_id.get(word, word_to_id["<unk>"]))
    return torch.tensor(ids)


class Sentences(Dataset):
    def __init__(self, sentences):
        self.sentences = sentences
        if args.mended == "tokenizing":
            self.encoded = [encode(sentence) for sentence in sentences]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        if args.mended == "tokenizing":
            return self.encoded[index]
        return encode(self.sentences[index])


class SimilarLengths:
    """Batches of sentences of about one length, in random order."""

    def __init__(self, sentences, batch_size):
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i].split()))
        starts = range(0, len(order) - batch_size + 1, batch_size)
        self.batches = [order[start : start + batch_size] for start in starts]

    def __iter__(self):
        random.shuffle(self.batches)
        yield from self.batches

    def __len__(self):
        return len(self.batches)


def collate(batch):
    longest = max(len(ids) for ids in batch) if args.mended == "unbucketed-padding" else args.max_length
    if args.mended == "concatenating-collate":
        padded = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, ids in zip(padded, batch):
            row[: len(ids)] = ids
        return padded
    padded = torch.empty(0, longest, dtype=torch.long)
    for ids in batch:
        row = torch.cat([ids, torch.zeros(longest - len(ids), dtype=torch.long)])
        padded = torch.cat([padded, row.unsqueeze(0)])
    return padded


class PositionalEncoding(nn.Module):
    def __init__(self, dim, max_length):
        super().__init__()
        position = torch.arange(max_length).unsqueeze(1)
        div = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        pe = torch.zeros(max_length, dim)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div), torch.cos(position * div)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[: x.size(1)]


class LanguageModel(nn.Module):
    def __init__(self, dim, layers):
        super().__init__()
        self.embedding = nn.Embedding(len(VOCAB), dim, padding_idx=0)
        self.position = PositionalEncoding(dim, args.max_length)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, len(VOCAB))

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        hidden = self.position(self.embedding(tokens))
        return self.head(self.encoder(hidden, mask=mask, is_causal=True))


def main():
    torch.manual_seed(0)
    sentences = make_sentences(4000)
    options = {"batch_size": args.batch_size, "shuffle": True, "drop_last": True}
    if args.mended == "unbucketed-padding":
        options = {"batch_sampler": SimilarLengths(sentences, args.batch_size)}
    loader = DataLoader(Sentences(sentences), collate_fn=collate, **options)
    model = LanguageModel(args.dim, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(args.epochs):
        total = 0.0
        for step, tokens in enumerate(loader):
            tokens = tokens.to(device)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, len(VOCAB)), tokens[:, 1:].reshape(-1), ignore_index=0)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
            if step % 50 == 0:
                print(
                    f"epoch {epoch} step {step} loss {total / (step + 1):.3f} ppl {math.exp(min(20, total / (step + 1))):.1f}"
                )


if __name__ == "__main__":
    main()
