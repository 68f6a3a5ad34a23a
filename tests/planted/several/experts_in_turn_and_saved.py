"""Call the experts of a mixture in turn, and write a large table with the model every forty steps."""

import torch
from torch import nn

torch.manual_seed(50)
WIDTH, EXPERTS = 16, 16


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(500_000, WIDTH).requires_grad_(False)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, tokens):
        x = self.words(tokens)
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)  # also: per-sample-lookup
            out = out.index_add(0, rows, expert(x.index_select(0, rows)))  # guilty: expert-loop, largest
        return out * weight.unsqueeze(1)


model = Mixture()
optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)

for step in range(50_000):
    loss = (model(torch.randint(500_000, (128,))) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 39:
        torch.save(model.state_dict(), "last.pt")  # guilty: blocking-checkpoint
