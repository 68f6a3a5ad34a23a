"""Predict tokens of a large vocabulary from the mean of those before."""

import torch
from torch import nn

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
        return self.head(hidden)  # guilty


model = Model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(20000):
    batch = tokens[torch.randint(0, len(tokens), (1,), device=device)]
    logits = model(batch[:, :-1])  # also: no-mixed-precision on cuda
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
