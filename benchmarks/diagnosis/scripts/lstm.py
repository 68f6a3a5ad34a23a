"""Train a character model with an LSTM cell and truncated backpropagation through time."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--bptt", type=int, default=35)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--mended", choices=["recurrent-cell-loop"])
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 96
torch.manual_seed(0)
corpus = torch.randint(0, VOCAB, (args.batch_size, 20_000), device=device)


class CharModel(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden)
        if args.mended == "recurrent-cell-loop":
            self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        else:
            self.cell = nn.LSTMCell(hidden, hidden)
        self.decoder = nn.Linear(hidden, VOCAB)

    def forward(self, tokens, state):
        embedded = self.embedding(tokens)
        if args.mended == "recurrent-cell-loop":
            h, c = state
            out, (h, c) = self.lstm(embedded, (h.unsqueeze(0), c.unsqueeze(0)))
            return self.decoder(out), (h[0], c[0])
        h, c = state
        outputs = []
        for t in range(tokens.size(1)):
            h, c = self.cell(embedded[:, t], (h, c))
            outputs.append(h)
        return self.decoder(torch.stack(outputs, dim=1)), (h, c)


def detach(state):
    return tuple(part.detach() for part in state)


def main():
    model = CharModel(args.hidden).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(args.epochs):
        state = tuple(torch.zeros(args.batch_size, args.hidden, device=device) for _ in range(2))
        total_loss = 0.0
        for step, start in enumerate(range(0, corpus.size(1) - args.bptt - 1, args.bptt)):
            inputs = corpus[:, start : start + args.bptt]
            targets = corpus[:, start + 1 : start + 1 + args.bptt]
            state = detach(state)
            logits, state = model(inputs, state)
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            total_loss += loss.item()
            if step % 100 == 99:
                print(f"epoch {epoch} batch {step + 1} loss {total_loss / (step + 1):.3f}")


if __name__ == "__main__":
    main()
