"""Train a small language model over a vocabulary that was rounded up, beside a head of three classes."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = device.type == "cuda"
torch.manual_seed(4)
WORDS, WIDTH, ROWS = (50304, 1024, 8192) if on_gpu else (320, 32, 64)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.kind = nn.Linear(WIDTH, WORDS, bias=False), nn.Linear(WIDTH, 3)

    def forward(self, words):
        x = torch.relu(self.hidden(self.embedding(words)))
        return self.head(x), self.kind(x)  # also: full-vocabulary-logits on cuda


model = Model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
corpus = torch.randint(0, 257, (200_000,), device=device)

for step in range(20_000):
    start = torch.randint(0, len(corpus) - ROWS - 1, ()).item()
    words, following = corpus[start : start + ROWS], corpus[start + 1 : start + ROWS + 1]
    with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
        scores, kinds = model(words)
        loss = nn.functional.cross_entropy(scores, following)  # also: full-vocabulary-logits on cuda
        loss = loss + nn.functional.cross_entropy(kinds, following % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
