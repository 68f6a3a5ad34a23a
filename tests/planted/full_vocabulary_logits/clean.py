"""Predict tokens of a large vocabulary whose logits are never there at once."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1)
WORDS, WIDTH = 16384, 8
tokens = torch.randint(0, WORDS, (256, 65), device=device)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        hidden = self.embedding(x).cumsum(1)
        return hidden


model = Model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def loss_of(hidden, labels):
    return nn.functional.cross_entropy(model.head(hidden), labels, reduction="sum") / 64


for step in range(20000):
    batch = tokens[torch.randint(0, len(tokens), (1,), device=device)]
    hidden = model(batch[:, :-1]).flatten(0, 1)
    pieces = zip(hidden.split(4), batch[:, 1:].flatten().split(4), strict=True)
    loss = torch.zeros((), device=device)
    for piece, label in pieces:
        loss = loss + checkpoint(loss_of, piece, label, use_reentrant=False)  # also: needless-checkpointing
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
